"""Kernels for projections fused with the collective beside them, which CANN's documents call MC2.

CANN overlaps the product with the communication. Its documents say to use the kernels in prefill, and not in decode,
without a number of rows. vllm-ascend takes 1000 tokens for its sequence parallelism in dense models, which uses
npu_mm_reduce_scatter_base.

Sources: torch_npu's documents of npu_mm_all_reduce_base, npu_all_gather_base_mm and npu_mm_reduce_scatter_base
(op-plugin, docs/context), and CANN's of aclnnMatmulAllReduce, aclnnAllGatherMatmulV2 and aclnnMatmulReduceScatterV2
(ops-transformer, mc2). Where two documents disagree, the stricter one holds. The mode ``ai_cpu`` of the last two is for
training; ``aiv`` is for inference, too. The ranks must be on one machine.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
import torch_npu
from torch import Tensor
from torch.nn import functional

from hal.device.group import Group
from hal.device.group import group as group_named
from hal.ops.kernels.kernel_table import Kernel
from hal.parallel import collectives

from ..soc import Generation

DTYPES = (torch.float16, torch.bfloat16)
IN_FEATURES = range(256, 65535)
"""The in_features that npu_all_gather_base_mm and npu_mm_reduce_scatter_base take."""


class FusedCollectives:
    """The kernels, and the conditions under which they are one launch. Otherwise they run the two operations.

    Args:
        device: the device.
        generation: its generation.
        fewest_rows: the fewest rows of a product for which it is fused.
        nz_weights: whether the weights of projections are in FRACTAL_NZ.
    """

    def __init__(self, device: torch.device, generation: Generation, fewest_rows: int, nz_weights: bool) -> None:
        self._device, self._generation = device, generation
        self._fewest_rows, self._nz_weights = fewest_rows, nz_weights
        self._names: weakref.WeakKeyDictionary[Group, str] = weakref.WeakKeyDictionary()

    @property
    def kernels(self) -> Mapping[str, Kernel]:
        """The kernels of the operations that the generation can fuse."""
        found: dict[str, Kernel] = {}
        if self._generation.all_reduce_ranks:
            found["linear_all_reduce"] = self.linear_all_reduce
        if self._generation.row_collective_ranks:
            found["all_gather_linear"] = self.all_gather_linear
            found["linear_reduce_scatter"] = self.linear_reduce_scatter
        return found

    @property
    def conditions(self) -> Mapping[str, Callable[..., str | None]]:
        """The functions that return why a call is not fused, or None, by operation."""
        every = {
            "linear_all_reduce": self.unfused_all_reduce,
            "all_gather_linear": self.unfused_gather,
            "linear_reduce_scatter": self.unfused_scatter,
        }
        return {name: every[name] for name in self.kernels}

    @property
    def sources(self) -> Mapping[str, str]:
        """What each kernel launches."""
        return {name: f"{_LAUNCHES[name]} from {self._fewest_rows} rows on" for name in self.kernels}

    def linear_all_reduce(self, x: Tensor, weight: Tensor, bias: Tensor | None, group: str) -> Tensor:
        """See :func:`hal.ops.linear_all_reduce`."""
        if self.unfused_all_reduce(x, weight, bias, group) is None:
            return torch_npu.npu_mm_all_reduce_base(  # type: ignore[no-any-return]
                x.contiguous(), weight.t(), self._name(group), bias=bias
            )
        product = functional.linear(x, weight, bias)
        return product if group_named(group).size == 1 else collectives.all_reduce(product, group)

    def all_gather_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, group: str) -> Tensor:
        """See :func:`hal.ops.all_gather_linear`."""
        if self.unfused_gather(x, weight, bias, group) is None:
            return torch_npu.npu_all_gather_base_mm(  # type: ignore[no-any-return]
                x.contiguous(), weight.t(), self._name(group), group_named(group).size, comm_mode="aiv"
            )[0]
        rows = x if group_named(group).size == 1 else collectives.all_gather_rows(x, group)
        return functional.linear(rows, weight, bias)

    def linear_reduce_scatter(self, x: Tensor, weight: Tensor, bias: Tensor | None, group: str) -> Tensor:
        """See :func:`hal.ops.linear_reduce_scatter`."""
        if self.unfused_scatter(x, weight, bias, group) is None:
            return torch_npu.npu_mm_reduce_scatter_base(  # type: ignore[no-any-return]
                x.contiguous(), weight.t(), self._name(group), group_named(group).size, comm_mode="aiv"
            )
        product = functional.linear(x, weight, bias)
        return product if group_named(group).size == 1 else collectives.reduce_scatter(product, group)

    def unfused_all_reduce(self, x: Tensor, weight: Tensor, bias: Tensor | None, group: str) -> str | None:
        """Return why ``linear_all_reduce`` is two launches for these arguments, or None if it is one."""
        launch, ranks = _LAUNCHES["linear_all_reduce"], self._generation.all_reduce_ranks
        if x.dim() not in (2, 3):
            return f"{launch} takes 2 or 3 dimensions, not {x.dim()}"
        if self._nz_weights:
            return f"the weight is in FRACTAL_NZ (option nz_weights), and {launch} takes ND"
        return self._unfused(launch, ranks, x, x.shape[:-1], group)

    def unfused_gather(self, x: Tensor, weight: Tensor, bias: Tensor | None, group: str) -> str | None:
        """Return why ``all_gather_linear`` is two launches for these arguments, or None if it is one."""
        launch, ranks = _LAUNCHES["all_gather_linear"], self._generation.row_collective_ranks
        if self._nz_weights:
            return f"the weight is in FRACTAL_NZ (option nz_weights), and {launch} takes ND"
        rows = x.shape[0] * group_named(group).size
        return _unlike_rows(launch, weight, bias) or self._unfused(launch, ranks, x, (rows,), group)

    def unfused_scatter(self, x: Tensor, weight: Tensor, bias: Tensor | None, group: str) -> str | None:
        """Return why ``linear_reduce_scatter`` is two launches for these arguments, or None if it is one."""
        launch, ranks = _LAUNCHES["linear_reduce_scatter"], self._generation.row_collective_ranks
        return _unlike_rows(launch, weight, bias) or self._unfused(launch, ranks, x, x.shape[:1], group)

    def _unfused(
        self, launch: str, supported: tuple[int, ...], x: Tensor, rows: tuple[int, ...], group: str
    ) -> str | None:
        size = group_named(group).size
        if size not in supported:
            return f"{launch} takes {_several(supported)} ranks, not {size}"
        if int(os.environ.get("LOCAL_WORLD_SIZE", size)) % size:
            return f"{launch} needs the ranks on one machine"
        if x.dtype not in DTYPES:
            return f"{launch} takes float16 and bfloat16, not {str(x.dtype).removeprefix('torch.')}"
        count = torch.Size(map(_most, rows)).numel()
        if count < max(self._fewest_rows, 1):
            known = "" if all(type(each) is int for each in rows) else "at most "
            return f"{known}{count} rows: {launch} is for prefill, from {self._fewest_rows} rows on (option mc2_rows)"
        return None

    def _name(self, name: str) -> str:
        """Return HCCL's name of a group."""
        group = group_named(name)
        if group not in self._names:
            backend = group.process_group._get_backend(self._device)
            # torch_npu takes a rank, of which it uses the index of the device.
            self._names[group] = backend.get_hccl_comm_name(self._device.index)
        return self._names[group]


def _most(size: int | torch.SymInt) -> int:
    """Return a size; for a symbolic one that of the example, which is the largest that the graph will run."""
    hint: int = size.node.hint if isinstance(size, torch.SymInt) else size
    return hint


def _unlike_rows(launch: str, weight: Tensor, bias: Tensor | None) -> str | None:
    if bias is not None:
        return f"{launch} takes no bias"
    if weight.shape[1] not in IN_FEATURES:
        return f"{launch} takes {IN_FEATURES.start} to {IN_FEATURES.stop - 1} in_features, not {weight.shape[1]}"
    return None


def _several(numbers: tuple[int, ...]) -> str:
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}"


_LAUNCHES = MappingProxyType(
    {
        "linear_all_reduce": "npu_mm_all_reduce_base",
        "all_gather_linear": "npu_all_gather_base_mm",
        "linear_reduce_scatter": "npu_mm_reduce_scatter_base",
    }
)
