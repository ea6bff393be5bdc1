"""Attention over the paged cache by FlashInfer, which plans a step on the host and then runs it for each layer.

A plan is made from the lengths on the host and from the block table. Layers of one step share it; a graph has one of
its own, in fixed memory, which is made anew before each replay.

Source: FlashInfer 0.6, ``flashinfer.decode`` and ``flashinfer.prefill``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from importlib import import_module
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from hal.ops.declaration import Kernel

from .attention import HALVES, one_query_each

HEAD_DIMS = (64, 128, 256)
WORKSPACE = 384 << 20
"""Bytes for partial results, which a graph has room for as if every sequence were long.

A decode of 256 sequences with 64 heads of 128 elements, 8 of keys, takes 201 MB: more than the 128 MiB of FlashInfer's
examples.
"""
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


class FlashInferAttention:
    """``paged_attention`` by FlashInfer; what it does not take goes to another kernel.

    Args:
        device: the GPU.
        otherwise: the other kernel.
        in_graphs: whether graphs capture this kernel; if not, what ``otherwise`` has for them.

    Attributes:
        in_graphs: as given.
        captured: what graphs capture if they do not capture this, or :meth:`for_graph` gives None.
    """

    def __init__(self, device: torch.device, otherwise: Kernel, *, in_graphs: bool = True) -> None:
        self._otherwise, self.in_graphs = otherwise, in_graphs
        self.captured: Kernel = getattr(otherwise, "captured", otherwise)
        self._library = import_module("flashinfer")
        self._device, self._done = device, torch.cuda.Event()
        self._wrappers: dict[str, Any] = {}
        self._planned: tuple[Any, ...] = ()
        self._run: Callable[..., Tensor] | None = None
        self._layers: set[int] = set()

    @cached_property
    def _workspace(self) -> Tensor:
        return torch.zeros(WORKSPACE, dtype=torch.uint8, device=self._device)

    def __call__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_table: Tensor,
        query_start_loc: Tensor,
        kv_lens: Tensor,
        query_start_loc_host: Tensor,
        kv_lens_host: Tensor,
        scale: float,
        causal: bool,
        sliding_window: int | None,
    ) -> Tensor:
        """See :func:`hal.ops.paged_attention`."""
        arguments = {
            "query": query, "key_cache": key_cache, "scale": scale, "causal": causal, "sliding_window": sliding_window
        }  # fmt: skip
        shape, queried = Shape.of(arguments), int(query_start_loc_host[-1])
        if not shape.taken or not queried:
            return self._otherwise(  # type: ignore[no-any-return]
                query, key_cache, value_cache, block_table, query_start_loc, kv_lens, query_start_loc_host,
                kv_lens_host, scale, causal, sliding_window,
            )  # fmt: skip
        # Tensors of a step are the same objects in all its layers. A layer that comes again begins another step, whose
        # tensors may be the same ones with new values.
        step = (shape, block_table, query_start_loc_host, kv_lens_host)
        known = len(self._planned) == len(step) and self._planned[0] == shape
        known = known and all(old is new for old, new in zip(self._planned[1:], step[1:], strict=True))
        layer = key_cache.data_ptr()
        if not known or layer in self._layers:
            with torch.inference_mode():  # which FlashInfer's buffers, made here, can be written under only
                self._run = self._plan(shape, query.shape[0], block_table, query_start_loc_host, kv_lens_host)
            self._planned, self._layers = step, set()
        self._layers.add(layer)
        assert self._run is not None
        attended = self._run(query[:queried].contiguous(), (key_cache, value_cache))
        left = query.shape[0] - queried
        return functional.pad(attended, (0, 0, 0, 0, 0, left)) if left else attended

    def _plan(self, shape: Shape, tokens: int, table: Tensor, starts: Tensor, lengths: Tensor) -> Callable[..., Tensor]:
        ends, places, last = pages_of(lengths, shape.block_size, table.shape[1])
        indices = _taken(table, places)
        sizes = (shape.heads, shape.kv_heads, shape.head_dim, shape.block_size)
        self._done.synchronize()  # FlashInfer stages every plan in the same memory of the host
        if one_query_each(tokens, starts.tolist()):
            wrapper = self._wrapper(f"decode, tensor cores {shape.tensor_cores}", shape)
            wrapper.plan(ends, indices, last, *sizes, **shape.settings())
        else:
            wrapper = self._wrapper("prefill", shape)
            wrapper.plan(starts, ends, indices, last, *sizes, causal=shape.causal, **shape.settings())
        self._done.record(torch.cuda.current_stream(table.device))
        run: Callable[..., Tensor] = wrapper.run
        return run

    def _wrapper(self, kind: str, shape: Shape) -> Any:
        if kind not in self._wrappers:
            if kind == "prefill":
                made = self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
            else:
                made = self._library.BatchDecodeWithPagedKVCacheWrapper(
                    self._workspace, "NHD", use_tensor_cores=shape.tensor_cores
                )
            self._wrappers[kind] = made
        return self._wrappers[kind]

    def for_graph(self, arguments: Arguments) -> GraphPlan | None:
        """What runs this call in a graph, and those of other layers that are like it; None if FlashInfer cannot.

        It cannot if the call is a prefill, whose plan has a size that depends on the lengths. Must be called by another
        thread than the one that captures: planning copies to the device.
        """
        shape, starts = Shape.of(arguments), arguments["query_start_loc_host"].tolist()
        if not shape.taken or not starts[-1] or not one_query_each(arguments["query"].shape[0], starts):
            return None
        return GraphPlan(self._library, self._workspace, shape, arguments)


def _taken(table: Tensor, places: Tensor) -> Tensor:
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
        indices = _taken(self.table, places)
        self._wrapper.plan(
            ends, indices, last, shape.heads, shape.kv_heads, shape.head_dim, shape.block_size, **shape.settings()
        )
        self._done.record(torch.cuda.current_stream(self.table.device))
