"""FlashInfer's plans for attention, which the layers of a step share.

Source: FlashInfer 0.6, ``flashinfer.decode`` and ``flashinfer.prefill``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from hal.ops import AttentionOptions

from ..attention import HALVES

HEAD_DIMS = (64, 128, 256)
GROUPED = 4
"""Minimum number of query heads per key head for a decode on the tensor cores."""

Arguments = Mapping[str, Any]


@attrs.frozen
class Shape:
    """The parameters of a plan, except lengths and block table."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    sinks: bool
    options: AttentionOptions

    @classmethod
    def of(cls, arguments: Arguments) -> Shape:
        """Return the shape of a call."""
        query, (_, block_size, kv_heads, _) = arguments["query"], arguments["key_cache"].shape
        return cls(
            query.shape[1],
            kv_heads,
            query.shape[2],
            block_size,
            query.dtype,
            arguments["sinks"] is not None,
            arguments["options"],
        )

    @property
    def supported(self) -> bool:
        """Whether FlashInfer has a kernel for the shape."""
        # FlashInfer supports windows only for causal attention, and sinks only in kernels of other classes.
        options = self.options
        masks = (options.causal or options.window is None) and options.chunk is None and options.alibi is None
        return self.head_dim in HEAD_DIMS and self.dtype in HALVES and masks and not self.sinks

    def settings(self) -> dict[str, Any]:
        """Return the keyword arguments of FlashInfer's plan methods, for decode and prefill."""
        options = self.options
        return {
            "sm_scale": options.scale,
            "window_left": -1 if options.window is None else options.window - 1,
            "logits_soft_cap": options.softcap,
            "q_data_type": self.dtype,
            "kv_data_type": self.dtype,
        }

    @property
    def tensor_cores(self) -> bool:
        """Whether decodes use the tensor cores."""
        return self.heads // self.kv_heads >= GROUPED


def pages_of(lengths: Tensor, block_size: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the positions of the sequences' blocks in the block table, computed on the host.

    Args:
        lengths: ``[sequences]``, int32, on the CPU.
        block_size: tokens per block.
        columns: columns of the block table.

    Returns:
        The offset of each sequence in the list of all blocks, ``[sequences + 1]``, int32; the index of each block in
        the flattened block table, int64; and the number of tokens in each sequence's last block, int32.
    """
    counts = (lengths + (block_size - 1)) // block_size
    ends = functional.pad(counts.cumsum(0), (1, 0))
    rows = torch.repeat_interleave(torch.arange(lengths.shape[0]), counts.long())
    places = rows * columns + torch.arange(int(ends[-1])) - ends[:-1][rows]
    last = torch.where(lengths > 0, (lengths - 1) % block_size + 1, 0)
    return ends.to(torch.int32), places, last.to(torch.int32)


@attrs.define
class Plan:
    """The plan of a step, with the values it was made from.

    Attributes:
        run: FlashInfer's planned function.
        table: the block table.
        version: torch's version counter of the table; None for an inference tensor, which has none.
        starts: a copy of ``query_start_loc_host``.
        lengths: a copy of ``kv_lens_host``.
        layers: the addresses of the caches of layers that have used the plan.
    """

    run: Callable[..., Tensor]
    table: Tensor
    version: int | None
    starts: Tensor
    lengths: Tensor
    layers: set[int] = attrs.field(factory=set)

    @classmethod
    def of(cls, run: Callable[..., Tensor], table: Tensor, starts: Tensor, lengths: Tensor) -> Plan:
        """Return the plan of a step."""
        return cls(run, table, _version(table), starts.clone(), lengths.clone())

    def serves(self, layer: int, table: Tensor, starts: Tensor, lengths: Tensor) -> bool:
        """Return whether the call belongs to the plan's step.

        A layer that has used the plan before begins another step. So does a change of the lengths, or of the table's
        version: the next call may come from another model.
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


def blocks_at(table: Tensor, places: Tensor) -> Tensor:
    """Return the entries of a block table at indices on the host, without waiting for the GPU."""
    return table.reshape(-1)[places.pin_memory().to(table.device, non_blocking=True)]


class GraphPlan:
    """The plan of a decode in a graph, in static memory, for all layers with the same shape and block table.

    Graphs share the workspace: it holds only partial results within a run.
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
            workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=shape.tensor_cores,
            paged_kv_indptr_buffer=ends,
            paged_kv_indices_buffer=indices,
            paged_kv_last_page_len_buffer=last,
        )
        self._done = torch.cuda.Event()
        self.update({"kv_lens_host": arguments["kv_lens_host"]})

    def serves(self, arguments: Arguments) -> bool:
        """Return whether the plan can run a call."""
        table = arguments["block_table"]
        alike = Shape.of(arguments) == self.shape and arguments["query"].shape[0] == self.table.shape[0]
        return alike and table.data_ptr() == self.table.data_ptr() and table.shape == self.table.shape

    def run(self, arguments: Arguments) -> Tensor:
        """Run a call."""
        caches = (arguments["key_cache"], arguments["value_cache"])
        attended: Tensor = self._wrapper.run(arguments["query"].contiguous(), caches)
        return attended

    def update(self, values: Mapping[str, Tensor]) -> None:
        """Plan for the lengths ``kv_lens_host`` and the block table's contents at the time the GPU reads it."""
        self._done.synchronize()  # FlashInfer stages all plans in the same host memory
        shape = self.shape
        ends, places, last = pages_of(values["kv_lens_host"], shape.block_size, self.table.shape[1])
        indices = blocks_at(self.table, places)
        self._wrapper.plan(
            ends, indices, last, shape.heads, shape.kv_heads, shape.head_dim, shape.block_size, **shape.settings()
        )
        self._done.record(torch.cuda.current_stream(self.table.device))
