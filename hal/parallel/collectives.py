"""Kernels of the collective operations on ``torch.distributed``, for every backend that brings no better ones.

With fake tensors, as in a trace, they call torch's functional collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, distributed
from torch._subclasses.fake_tensor import FakeTensor

from hal.device.group import Group
from hal.device.group import group as group_named
from hal.errors import CommunicationError
from hal.ops.declaration.operation import operation
from hal.ops.kernels.kernel_table import Kernel

functional: Any = torch.ops._c10d_functional
"""What compilers know of collectives: a trace of a kernel, for a driver's compiler, has these nodes."""
# torch 2.13 renames both functions, and warns of the old names.
_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
_scatter = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor


def started(name: str) -> Group:
    """Return the group ``name``, whose ranks can run collectives.

    Raises:
        ConfigError: there is no such group.
        CommunicationError: its ranks are only planned.
    """
    found = group_named(name)
    if found.planned:
        raise CommunicationError(
            f"the {found.size} ranks of the group {name!r} are only planned, so that no collective can run",
            "trace the step, or start the ranks, as `hal generate --tensor-parallel` does",
        )
    return found


def all_reduce(x: Tensor, group: str, out: Tensor | None = None) -> Tensor:
    """See :func:`hal.ops.all_reduce`."""
    ranks = started(group)
    if isinstance(x, FakeTensor) and ranks.size > 1:
        summed: Tensor = functional.wait_tensor(functional.all_reduce(x, "sum", ranks.process_group.group_name))
        return summed
    result = _copied(x, out)
    if ranks.size > 1 and x.numel():
        _run(ranks, "all_reduce", x, lambda: distributed.all_reduce(result, group=ranks.process_group))
    return result


def all_gather(x: Tensor, group: str, out: Tensor | None = None) -> Tensor:
    """See :func:`hal.ops.all_gather`."""
    ranks = started(group)
    if ranks.size == 1:
        return _copied(x, out)
    rows = ranks.size * x.shape[0]
    traced = partial(functional.all_gather_into_tensor, x, ranks.size)
    joined = _joined(_exchanged("all_gather", x, ranks, rows, _gather, traced), ranks.size)
    return joined if out is None else out.copy_(joined)


def all_gather_rows(x: Tensor, group: str, out: Tensor | None = None) -> Tensor:
    """See :func:`hal.ops.all_gather_rows`."""
    ranks = started(group)
    traced = partial(functional.all_gather_into_tensor, x, ranks.size)
    return _exchanged("all_gather_rows", x, ranks, ranks.size * x.shape[0], _gather, traced, out)


def reduce_scatter(x: Tensor, group: str, out: Tensor | None = None) -> Tensor:
    """See :func:`hal.ops.reduce_scatter`."""
    ranks = started(group)
    traced = partial(functional.reduce_scatter_tensor, x, "sum", ranks.size)
    return _exchanged("reduce_scatter", x, ranks, x.shape[0] // ranks.size, _scatter, traced, out)


def all_to_all(x: Tensor, group: str, out: Tensor | None = None) -> Tensor:
    """See :func:`hal.ops.all_to_all`."""
    ranks = started(group)
    parts = [x.shape[0] // ranks.size] * ranks.size
    traced = partial(functional.all_to_all_single, x, parts, parts)
    return _exchanged("all_to_all", x, ranks, x.shape[0], distributed.all_to_all_single, traced, out)


def _exchanged(
    name: str,
    x: Tensor,
    ranks: Group,
    rows: int,
    call: Callable[..., Any],
    traced: Callable[[str], Tensor],
    out: Tensor | None = None,
) -> Tensor:
    """Run a collective on rows.

    Args:
        name: the operation's name, for errors.
        x: this rank's rows.
        ranks: the group.
        rows: the number of rows of the result.
        call: the function of ``torch.distributed``, which takes the result and ``x``.
        traced: makes the node of a trace; takes the name of the process group.
        out: the tensor for the result; None allocates it.
    """
    if ranks.size == 1:
        return _copied(x, out)
    if isinstance(x, FakeTensor):
        waited: Tensor = functional.wait_tensor(traced(ranks.process_group.group_name))
        return waited
    result = x.new_empty(rows, *x.shape[1:]) if out is None else out
    if x.numel():
        given = x.contiguous()
        _run(ranks, name, x, lambda: call(result, given, group=ranks.process_group))
    return result


def _joined(stacked: Tensor, size: int) -> Tensor:
    """Turn ``[size * rows, ..., width]`` into ``[rows, ..., size * width]``."""
    parts: Tensor = stacked.unflatten(0, (size, -1))
    return parts.movedim(0, -2).flatten(-2)


def _copied(x: Tensor, out: Tensor | None) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format) if out is None else out.copy_(x)


def _run(group: Group, name: str, x: Tensor, call: Callable[[], Any]) -> None:
    try:
        call()
    except RuntimeError as error:
        first = str(error).partition("\n")[0]
        raise CommunicationError(
            f"{name} of {[*x.shape]} {x.dtype} failed in the group {group.name!r}, on rank {group.rank} of "
            f"{group.size}: {first}",
            "look for the first error of another rank; the group cannot be used again, so start the ranks anew",
        ) from error


KERNELS: Mapping[str, Kernel] = MappingProxyType(
    {
        "all_gather": all_gather,
        "all_gather_rows": all_gather_rows,
        "all_reduce": all_reduce,
        "all_to_all": all_to_all,
        "reduce_scatter": reduce_scatter,
    }
)
"""Kernels by operation. They run in every group whose process group supports the device."""
EXCHANGES: Mapping[str, Kernel] = MappingProxyType(
    {name: operation(name).body for name in ("expert_combine", "expert_dispatch")}
)
"""Kernels of expert dispatch and combine, by operation. Each calls the backend's :func:`hal.ops.all_to_all`."""
