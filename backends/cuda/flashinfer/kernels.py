"""FlashInfer's attention over the paged cache, norms and activation; another kernel runs other arguments.

Attention plans a step on the host and then runs it for each layer. A plan depends on the lengths on the host and on the
block table. The layers of a step share a plan. A graph has a separate plan in static memory, which is updated before
each replay. Norms and activation support 16-bit types and whole vectors.

Two families of FlashInfer are not used. Its rotary embedding takes positions and a float32 table, but the operation
takes the cosines and sines of each token. Its sampling has its own random generator, but the operation's draw is
reproducible.

Source: FlashInfer 0.6, ``flashinfer.decode``, ``prefill``, ``norm`` and ``activation``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hal.ops import AttentionOptions
from hal.ops.kernels.kernel_table import Kernel
from hal.step.shape import one_query_each

from .plans import Arguments, GraphPlan, Plan, Shape, blocks_at, pages_of

WORKSPACE = 384 << 20
"""Bytes for partial results. A graph needs room for the case that every sequence is long.

A decode of 256 sequences with 64 query heads and 8 key heads of 128 elements takes 201 MB, which exceeds the 128 MiB of
FlashInfer's examples.
"""


class FlashInferAttention:
    """``paged_attention`` with FlashInfer, and with another kernel for arguments that FlashInfer does not support.

    Args:
        device: the GPU.
        otherwise: the other kernel.
        in_graphs: whether graphs capture this kernel instead of ``otherwise``.

    Attributes:
        in_graphs: the argument.
        captured: the kernel that graphs capture if ``in_graphs`` is false, or :meth:`for_graph` returns None.
    """

    def __init__(self, device: torch.device, otherwise: Kernel, *, in_graphs: bool = True) -> None:
        self._otherwise, self.in_graphs = otherwise, in_graphs
        self.captured: Kernel = getattr(otherwise, "captured", otherwise)
        self._library = import_module("flashinfer")
        self._device, self._done = device, torch.cuda.Event()
        self._wrappers: dict[tuple[str, Shape], Any] = {}
        self._plans: dict[Shape, Plan] = {}

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
        sinks: Tensor | None,
        options: AttentionOptions,
    ) -> Tensor:
        """See :func:`hal.ops.paged_attention`."""
        arguments = {"query": query, "key_cache": key_cache, "sinks": sinks, "options": options}
        shape, queried = Shape.of(arguments), int(query_start_loc_host[-1])
        if not shape.supported or not queried:
            cache = key_cache, value_cache, block_table
            lengths = query_start_loc, kv_lens, query_start_loc_host, kv_lens_host
            return self._otherwise(query, *cache, *lengths, sinks, options)  # type: ignore[no-any-return]
        layer = key_cache.data_ptr()
        plan = self._plans.get(shape)
        if plan is None or not plan.serves(layer, block_table, query_start_loc_host, kv_lens_host):
            with torch.inference_mode():  # FlashInfer allocates buffers here that are writable only in this mode
                run = self._plan(shape, query.shape[0], block_table, query_start_loc_host, kv_lens_host)
            plan = self._plans[shape] = Plan.of(run, block_table, query_start_loc_host, kv_lens_host)
        plan.layers.add(layer)
        attended = plan.run(query[:queried].contiguous(), (key_cache, value_cache))
        left = query.shape[0] - queried
        return functional.pad(attended, (0, 0, 0, 0, 0, left)) if left else attended

    def _plan(self, shape: Shape, tokens: int, table: Tensor, starts: Tensor, lengths: Tensor) -> Callable[..., Tensor]:
        ends, places, last = pages_of(lengths, shape.block_size, table.shape[1])
        indices = blocks_at(table, places)
        sizes = (shape.heads, shape.kv_heads, shape.head_dim, shape.block_size)
        self._done.synchronize()  # FlashInfer stages all plans in the same host memory
        if one_query_each(tokens, starts.tolist()):
            wrapper = self._wrapper(f"decode, tensor cores {shape.tensor_cores}", shape)
            wrapper.plan(ends, indices, last, *sizes, **shape.settings())
        else:
            wrapper = self._wrapper("prefill", shape)
            wrapper.plan(starts, ends, indices, last, *sizes, causal=shape.options.causal, **shape.settings())
        self._done.record(torch.cuda.current_stream(table.device))
        run: Callable[..., Tensor] = wrapper.run
        return run

    def _wrapper(self, kind: str, shape: Shape) -> Any:
        if (kind, shape) not in self._wrappers:  # one per shape, because a model's layers may alternate between two
            if kind == "prefill":
                made = self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
            else:
                made = self._library.BatchDecodeWithPagedKVCacheWrapper(
                    self._workspace, "NHD", use_tensor_cores=shape.tensor_cores
                )
            self._wrappers[kind, shape] = made
        return self._wrappers[kind, shape]

    def release(self) -> None:
        """Release the workspace and the block tables of plans. The next call allocates them again."""
        self._wrappers.clear()
        self._plans.clear()
        self.__dict__.pop("_workspace", None)

    def for_graph(self, arguments: Arguments) -> GraphPlan | None:
        """Return a plan that runs this call and similar calls of other layers in a graph; None if FlashInfer cannot.

        FlashInfer cannot run a prefill in a graph, because the plan's size depends on the lengths. Call this on another
        thread than the capturing one: planning copies to the device.
        """
        shape, starts = Shape.of(arguments), arguments["query_start_loc_host"].tolist()
        if not shape.supported or not starts[-1] or not one_query_each(arguments["query"].shape[0], starts):
            return None
        return GraphPlan(self._library, self._workspace, shape, arguments)


HALVES = (torch.bfloat16, torch.float16)
VECTOR = 16
"""The size of a row must be a multiple of this many bytes."""


def kernels(device: torch.device, otherwise: Mapping[str, Kernel], *, in_graphs: bool) -> dict[str, Kernel]:
    """Return FlashInfer's kernels, by operation.

    Args:
        device: the GPU.
        otherwise: kernels for arguments that FlashInfer does not support, by operation.
        in_graphs: whether graphs capture FlashInfer's attention.
    """
    flashinfer = import_module("flashinfer")
    plain_norm, plain_add, plain_silu = (otherwise[name] for name in ("rms_norm", "add_rms_norm", "silu_and_mul"))

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See :func:`hal.ops.rms_norm`."""
        if not _takes(x) or weight.dtype is not x.dtype or not weight.is_contiguous():
            return plain_norm(x, weight, eps)  # type: ignore[no-any-return]
        return flashinfer.rmsnorm(x.reshape(-1, x.shape[-1]), weight, eps).view(x.shape)  # type: ignore[no-any-return]

    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See :func:`hal.ops.add_rms_norm`. FlashInfer overwrites both arguments, so both are copied."""
        if not _takes(x) or weight.dtype is not x.dtype or not weight.is_contiguous():
            return plain_add(x, residual, weight, eps)  # type: ignore[no-any-return]
        width = x.shape[-1]
        normed, hidden = (each.clone(memory_format=torch.contiguous_format) for each in (x, residual))
        flashinfer.fused_add_rmsnorm(normed.view(-1, width), hidden.view(-1, width), weight, eps)
        return normed, hidden

    def silu_and_mul(x: Tensor) -> Tensor:
        """See :func:`hal.ops.silu_and_mul`."""
        if not _takes(x) or x.shape[-1] // 2 * x.element_size() % VECTOR:
            return plain_silu(x)  # type: ignore[no-any-return]
        return flashinfer.silu_and_mul(x.contiguous())  # type: ignore[no-any-return]

    return {
        "add_rms_norm": add_rms_norm,
        "paged_attention": FlashInferAttention(device, otherwise["paged_attention"], in_graphs=in_graphs),
        "rms_norm": rms_norm,
        "silu_and_mul": silu_and_mul,
    }


def _takes(x: Tensor) -> bool:
    return x.dtype in HALVES and x.shape[-1] * x.element_size() % VECTOR == 0 and x.numel() > 0
