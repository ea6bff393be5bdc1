"""FlashInfer's plans for attention: what a step's layers share, made on the host from its lengths and its block table.

Source: FlashInfer 0.6, ``flashinfer.decode`` and ``flashinfer.prefill``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from ..attention import HALVES

HEAD_DIMS = (64, 128, 256)
GROUPED = 4
"""Query heads to a key head from which on a decode goes to the tensor cores."""

Arguments = Mapping[str, Any]


@attrs.frozen
class Shape:
    """What a plan is made for, besides lengths and block table."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    scale: float
    causal: bool
    window: int | None

    @classmethod
    def of(cls, arguments: Arguments) -> Shape:
        """That of a call."""
        query, (_, block_size, kv_heads, _) = arguments["query"], arguments["key_cache"].shape
        return cls(
            query.shape[1], kv_heads, query.shape[2], block_size, query.dtype, arguments["scale"], arguments["causal"],
            arguments["sliding_window"],
        )  # fmt: skip

    @property
    def taken(self) -> bool:
        """Whether FlashInfer has a kernel for it."""
        # Of windows it has the causal kind only.
        return self.head_dim in HEAD_DIMS and self.dtype in HALVES and (self.causal or self.window is None)

    def settings(self) -> dict[str, Any]:
        """What both kinds of plan take by name."""
        window_left = -1 if self.window is None else self.window - 1
        return {
            "sm_scale": self.scale, "window_left": window_left, "q_data_type": self.dtype, "kv_data_type": self.dtype
        }  # fmt: skip

    @property
    def tensor_cores(self) -> bool:
        """Whether decodes go to them."""
        return self.heads // self.kv_heads >= GROUPED


def pages_of(lengths: Tensor, block_size: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where a plan finds the blocks of each sequence: on the host, from its lengths.

    Args:
        lengths: ``[sequences]``, int32, on the CPU.
        block_size: tokens per block.
        columns: of the block table.

    Returns:
        Where each sequence's blocks begin in the list of all, ``[sequences + 1]``, int32; for each block in that list,
        its place in the flattened block table, int64; and the tokens in each sequence's last block, int32, 0 if there
        is none.
    """
    counts = (lengths + (block_size - 1)) // block_size
    ends = functional.pad(counts.cumsum(0), (1, 0))
    rows = torch.repeat_interleave(torch.arange(lengths.shape[0]), counts.long())
    places = rows * columns + torch.arange(int(ends[-1])) - ends[:-1][rows]
    last = torch.where(lengths > 0, (lengths - 1) % block_size + 1, 0)
    return ends.to(torch.int32), places, last.to(torch.int32)


@attrs.define
class Plan:
    """A plan, and what tells whether it serves a call: the layers of a step share it.

    Attributes:
        run: FlashInfer's function, planned.
        table: the block table.
        version: how often the table had been written to, or None where torch does not count it.
        starts: ``query_start_loc_host`` as it was.
        lengths: ``kv_lens_host`` as it was.
        layers: addresses of the caches that it served.
    """

    run: Callable[..., Tensor]
    table: Tensor
    version: int | None
    starts: Tensor
    lengths: Tensor
    layers: set[int] = attrs.field(factory=set)

    @classmethod
    def of(cls, run: Callable[..., Tensor], table: Tensor, starts: Tensor, lengths: Tensor) -> Plan:
        """That of a step."""
        return cls(run, table, _version(table), starts.clone(), lengths.clone())

    def serves(self, layer: int, table: Tensor, starts: Tensor, lengths: Tensor) -> bool:
        """Whether the call is of the step that the plan was made for.

        A layer that comes again begins another step. So does a change of what the host knows, or of the table where
        torch counts writes to it: another model may come next, whose layers the plan has not served.
        """
        return (
            layer not in self.layers
            and table is self.table
            and _version(table) == self.version
            and torch.equal(lengths, self.lengths)
            and torch.equal(starts, self.starts)
        )


def _version(table: Tensor) -> int | None:
    return None if table.is_inference() else table._version


def taken(table: Tensor, places: Tensor) -> Tensor:
    """The entries of a block table at places that the host knows, without a wait for the GPU."""
    return table.reshape(-1)[places.pin_memory().to(table.device, non_blocking=True)]


class GraphPlan:
    """A decode's attention in one graph: a plan in fixed memory, for all layers that agree in shape and tensors.

    The workspace is for partial results only, which no run leaves to another, so that all share one.
    """

    def __init__(self, library: Any, workspace: Tensor, shape: Shape, arguments: Arguments) -> None:
        device = workspace.device
        self.shape, self.table = shape, arguments["block_table"]
        sequences, columns = self.table.shape
        ends, indices, last = (
            torch.zeros(size, dtype=torch.int32, device=device)
            for size in (sequences + 1, sequences * columns, sequences)
        )
        self._wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_cuda_graph=True, use_tensor_cores=shape.tensor_cores, paged_kv_indptr_buffer=ends,
            paged_kv_indices_buffer=indices, paged_kv_last_page_len_buffer=last,
        )  # fmt: skip
        self._done = torch.cuda.Event()
        self.update({"kv_lens_host": arguments["kv_lens_host"]})

    def serves(self, arguments: Arguments) -> bool:
        """Whether it can run this call, too."""
        table = arguments["block_table"]
        alike = Shape.of(arguments) == self.shape and arguments["query"].shape[0] == self.table.shape[0]
        return alike and table.data_ptr() == self.table.data_ptr() and table.shape == self.table.shape

    def run(self, arguments: Arguments) -> Tensor:
        """The call."""
        caches = (arguments["key_cache"], arguments["value_cache"])
        attended: Tensor = self._wrapper.run(arguments["query"].contiguous(), caches)
        return attended

    def update(self, values: Mapping[str, Tensor]) -> None:
        """Plan for the lengths ``kv_lens_host``, and for what the block table holds when the GPU comes to it."""
        self._done.synchronize()  # as for plans without a graph
        shape = self.shape
        ends, places, last = pages_of(values["kv_lens_host"], shape.block_size, self.table.shape[1])
        indices = taken(self.table, places)
        self._wrapper.plan(
            ends, indices, last, shape.heads, shape.kv_heads, shape.head_dim, shape.block_size, **shape.settings()
        )
        self._done.record(torch.cuda.current_stream(self.table.device))
