"""Cases of limits: a backend supports every value in its limits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor

from hal import ops
from hal.checkpoint.loading import load_model
from hal.drivers.backend import Backend
from hal.execution.runner import Runner
from hal.nn import WeightUse
from hal.ops.declaration.constraints import Draw
from hal.ops.rounding import check_logits
from hal.ops.tolerance import assert_agree
from hal.step.state import StateSpec, canonical_states
from hal.testing.case import Case, NotApplicable, require
from hal.testing.model_cases import head_dim_of
from hal.testing.random_checkpoint import checkpoint
from hal.testing.step_plans import Plan, reference_logits, run_plan
from hal.testing.target import Target, dtype_name

ANY_BLOCK_SIZE = (1, 8, 16, 48, 64, 128)
"""Values tested on a backend without a list of block sizes."""
ANY_HEAD_DIM = (16, 32, 64, 80, 96, 128, 192, 256)
"""Values tested on a backend without a list of head dimensions."""
MANY_STREAMS = 4096
"""Maximum number of streams used to test a limit."""
ATTENTION = "paged_attention"


def cases(target: Target) -> Iterator[Case]:
    """Yield ``limits/<limit>/<value>``."""
    limits = target.backend.limits
    for dtype in limits.dtypes:
        yield Case(f"limits/dtypes/{dtype_name(dtype)}", partial(_dtype, target, dtype))
    for size in limits.block_sizes or ANY_BLOCK_SIZE:
        for dtype in limits.dtypes:
            yield Case(f"limits/block_sizes/{size}/{dtype_name(dtype)}", partial(_block_size, target, size, dtype))
    for head_dim in limits.head_dims or ANY_HEAD_DIM:
        for dtype in limits.dtypes:
            yield Case(f"limits/head_dims/{head_dim}/{dtype_name(dtype)}", partial(_head_dim, target, head_dim, dtype))
    for group in (1, 2, 3, 7, 8):
        yield Case(f"limits/heads-per-kv-head/{group}", partial(_group, target, group))
    if "graph" in target.backend.compilers:
        yield Case("limits/streams", partial(_streams, target))
        yield Case("limits/capture_sizes", partial(_capture_sizes, target))


def _dtype(target: Target, dtype: torch.dtype) -> None:
    """Check tensors and ``linear`` in a dtype."""
    backend = target.open(dtype=dtype_name(dtype))
    x = torch.ones(4, 64, dtype=dtype, device=backend.device.torch)
    weight = backend.prepare_weights({"weight": x[:3].clone()}, WeightUse("linear", dtype))["weight"]
    with torch.inference_mode():
        result: Tensor = backend.ops.linear(x, weight, None)
    require(result.dtype == dtype, f"linear returns {result.dtype} for {dtype}")
    require(result.cpu().tolist() == [[64.0] * 3] * 4, "linear returns wrong values")


def _check_edges(target: Target, dtype: torch.dtype, size: int, head_dim: int, heads: int, kv_heads: int) -> None:
    """Check sequence lengths around block boundaries, with one query and several queries per sequence."""
    lengths = sorted({1, max(1, size - 1), size, size + 1, 2 * size})
    paged = Paged.filled(target.activated(), dtype, size, head_dim, lengths, heads=heads, kv_heads=kv_heads)
    paged.check([1] * len(lengths), lengths)
    paged.check([min(3, length) for length in lengths], lengths)
    paged.check([1] * len(lengths), [max(1, length - 1) for length in lengths], window=max(1, size // 2))


def _block_size(target: Target, size: int, dtype: torch.dtype) -> None:
    _check_edges(target, dtype, size, head_dim_of(target), 4, 2)


def _head_dim(target: Target, head_dim: int, dtype: torch.dtype) -> None:
    _check_edges(target, dtype, target.backend.block_size, head_dim, 4, 2)


def _group(target: Target, group: int) -> None:
    _check_edges(target, target.backend.limits.dtypes[0], target.backend.block_size, head_dim_of(target), group, 1)


def _streams(target: Target) -> None:
    """Check that as many graphs as ``max_streams`` allows can be alive together."""
    limits = target.backend.limits
    if limits.max_streams is None:
        raise NotApplicable("the backend has no `max_streams` limit")
    target.clear_cache()
    count = min(limits.max_streams, MANY_STREAMS) // limits.streams_per_graph
    backend = target.activated()
    x = torch.ones(8, dtype=limits.dtypes[0], device=backend.device.torch)
    graphs = [backend.graph() for _ in range(count)]
    pool, outputs = None, []
    try:
        for number, graph in enumerate(graphs):
            outputs.append(graph.capture(partial(torch.add, x, number % 64), pool=pool))
            pool = graph.pool
        for number in (0, count // 2, count - 1):
            graphs[number].replay()
            found = outputs[number].cpu().tolist()
            require(found == [1.0 + number % 64] * 8, f"graph {number} of {count} returns {found}")
    finally:
        for graph in graphs:
            graph.reset()


def _capture_sizes(target: Target) -> None:
    """Check decode steps of the smallest and the largest default capture sizes."""
    limits = target.backend.limits
    most, size, dtype = max(limits.capture_sizes), target.backend.block_size, limits.dtypes[0]
    backend = target.open(
        dtype=dtype_name(dtype),
        compilation={"compiler": "graph"},
        cache={"num_tokens": (most + 3) * size, "block_size": size},
    )
    runner = Runner(load_model(checkpoint("qwen3", head_dim_of(target)), backend), backend)
    for count in sorted({1, *limits.capture_sizes[-2:]}):
        plan = Plan((2,) * count, (tuple(range(count)),), seed=count)
        known = reference_logits("qwen3", head_dim_of(target), dtype, plan.texts(runner.model.vocab_size))
        check_logits(run_plan(runner, plan), known)


@attrs.frozen
class Paged:
    """Sequences in a backend's cache, written by its ``store_kv_cache``, and in a canonical cache on the CPU.

    In the canonical layout, slots without a token hold NaN.
    """

    backend: Backend
    dtype: torch.dtype
    heads: int
    head_dim: int
    caches: tuple[Tensor, Tensor]
    reference: tuple[Tensor, Tensor]
    table: Tensor

    @classmethod
    def filled(
        cls,
        backend: Backend,
        dtype: torch.dtype,
        block_size: int,
        head_dim: int,
        lengths: Sequence[int],
        *,
        heads: int = 4,
        kv_heads: int = 2,
    ) -> Paged:
        """Create a cache with sequences of these lengths in scattered blocks."""
        needed = [math.ceil(length / block_size) for length in lengths]
        spec = StateSpec.key_value(1, kv_heads, head_dim, dtype, sum(needed) + 2, block_size)
        draw = Draw(dtype)
        free = (1 + draw.permutation(sum(needed))).tolist()
        table = torch.zeros(len(lengths), max(needed), dtype=torch.int32)
        slots: list[int] = []
        for row, (count, length) in enumerate(zip(needed, lengths, strict=True)):
            owned = [free.pop() for _ in range(count)]
            table[row, :count] = torch.tensor(owned, dtype=torch.int32)
            slots += [owned[at // block_size] * block_size + at % block_size for at in range(length)]
        keys, values = (draw.normal(sum(lengths), kv_heads, head_dim) for _ in range(2))
        where = torch.tensor(slots, dtype=torch.int32)
        with torch.inference_mode():
            caches, reference = (
                (each.layers[0]["key"], each.layers[0]["value"])
                for each in (backend.allocate(spec), canonical_states(spec, torch.device("cpu")))
            )
            for cache in (*reference, *(caches if backend.state_layout == "canonical" else ())):
                cache.fill_(math.nan)
            device = backend.device.torch
            ops.store_kv_cache(keys.to(device), values.to(device), *caches, where.to(device))
            ops.operation("store_kv_cache").reference(keys, values, *reference, where)
        return cls(backend, dtype, heads, head_dim, caches, reference, table.to(device))

    def check(
        self, query_lens: Sequence[int], kv_lens: Sequence[int], *, causal: bool = True, window: int | None = None
    ) -> None:
        """Attend with the last ``query_lens`` tokens of each sequence.

        Raises:
            AssertionError: the result differs from the reference's.
        """
        device, operation = self.backend.device.torch, ops.operation(ATTENTION)
        query = Draw(self.dtype, seed=sum(kv_lens)).normal(sum(query_lens), self.heads, self.head_dim)
        starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
        lens = torch.tensor(kv_lens, dtype=torch.int32)
        options = ops.AttentionOptions(self.head_dim**-0.5, window=window, causal=causal)
        rest: tuple[Any, ...] = starts, lens, None, options
        with torch.inference_mode():
            found = ops.paged_attention(
                query.to(device), *self.caches, self.table, starts.to(device), lens.to(device), *rest
            )
            self.backend.device.synchronize()
            expected = operation.reference(query, *self.reference, self.table.cpu(), starts, lens, *rest)
        assert_agree(operation, self.dtype, found, expected, f"queries {list(query_lens)} of {list(kv_lens)}")
