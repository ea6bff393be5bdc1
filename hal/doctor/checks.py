"""The checks of a device: a matrix product, the operations of a decoder step, attention, and a graph of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from hal import ops
from hal.drivers.backend import Backend
from hal.nn import WeightUse
from hal.ops import Draw
from hal.ops.tolerance import assert_agree
from hal.step.state import StateMemory, StateSpec, canonical_states

OPERATIONS = ("embedding", "linear", "rms_norm", "rotary_embedding", "silu_and_mul", "greedy_sample")
"""The operations of a decoder step except attention; the conformance suite checks all operations."""
SAMPLES = 2
SIZE = 64
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 128
BLOCKS = 2
"""Number of cache blocks of each of the two sequences."""
EPSILON = 1e-6


class Skipped(Exception):
    """The backend does not support what the check needs; the message is the reason."""


def checks(backend: Backend) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield names and check functions, which return a description of their work.

    A check raises AssertionError if a result is wrong, and Skipped if it does not apply. ``backend`` must be active.
    """
    yield "matmul", partial(_matmul, backend)
    for name in OPERATIONS:
        yield name, partial(_operation, backend, name)
    yield "attention", partial(_attention, backend)
    yield "graph", partial(_graph, backend)


def _matmul(backend: Backend) -> str:
    for dtype in backend.limits.dtypes:
        draw = Draw(dtype)
        # With values -1, 0 and 1 every dtype represents every sum exactly.
        left, right = (draw.integers(-1, 2, SIZE, SIZE).to(dtype) for _ in range(2))
        found = left.to(backend.device.torch) @ right.to(backend.device.torch)
        torch.testing.assert_close(found.cpu(), (left.float() @ right.float()).to(dtype), rtol=0, atol=0)
    return f"{SIZE} x {SIZE}, {_names(backend.limits.dtypes)}"


def _operation(backend: Backend, name: str) -> str:
    operation = ops.operation(name)
    for dtype in backend.limits.dtypes:
        drawn = (operation.samples(Draw(dtype, device)) for device in (backend.device.torch, "cpu"))
        for sample, again in islice(zip(*drawn, strict=True), SAMPLES):
            expected = operation.reference(*again)
            given = dict(zip(operation.signature.parameters, sample, strict=False))  # samples may omit defaults
            for weight in operation.weights:
                given[weight] = backend.prepare_weight(given[weight], WeightUse(name, weight, dtype))
            assert_agree(operation, dtype, operation.function(**given), expected)
    kind = "kernel" if name in backend.kernels else "reference"
    return f"{kind}, {_names(backend.limits.dtypes)}"


def _attention(backend: Backend) -> str:
    for dtype in backend.limits.dtypes:
        _Attention(backend, dtype).check()
    return f"blocks of {backend.block_size}, {_names(backend.limits.dtypes)}"


def _graph(backend: Backend) -> str:
    if "graph" not in backend.compilers:
        raise Skipped("the backend does not support graphs")
    dtype, device = backend.limits.dtypes[0], backend.device.torch
    norm, attention, draw = ops.operation("rms_norm"), _Attention(backend, dtype), Draw(dtype)
    first, second, weight = draw.normal(2, SIZE), draw.normal(2, SIZE), draw.normal(SIZE)
    x, on_device = first.to(device), weight.to(device)
    graph = backend.graph()
    try:
        attended, normed = graph.capture(lambda: (attention.run(), ops.rms_norm(x, on_device, EPSILON)))
        for rows, lengths in ((second, attention.later), (first, attention.lengths)):
            x.copy_(rows)
            graph.replay(**attention.update(lengths))
            backend.device.synchronize()
            attention.compare(attended, "of a replayed graph")
            assert_agree(norm, dtype, normed, norm.reference(rows, weight, EPSILON), "of a replayed graph")
    finally:
        graph.reset()
    return "captured, and replayed twice with new inputs and lengths"


class _Attention:
    """A decode step of two sequences over a cache of the backend, and over a canonical cache on the CPU."""

    def __init__(self, backend: Backend, dtype: torch.dtype) -> None:
        self.backend, self.dtype = backend, dtype
        self.operation, store = ops.operation("paged_attention"), ops.operation("store_kv_cache")
        dims, size, draw = backend.limits.head_dims, backend.block_size, Draw(dtype)
        head_dim = HEAD_DIM if not dims or HEAD_DIM in dims else dims[0]
        spec = StateSpec.key_value(1, KV_HEADS, head_dim, dtype, num_blocks=1 + 2 * BLOCKS, block_size=size)
        key, value = (draw.normal(2 * BLOCKS * size, KV_HEADS, head_dim) for _ in range(2))
        slots = torch.arange(size, (1 + 2 * BLOCKS) * size, dtype=torch.int32)
        self.query, self.options = draw.normal(2, HEADS, head_dim), ops.AttentionOptions(head_dim**-0.5)
        self.table = torch.arange(1, 1 + 2 * BLOCKS, dtype=torch.int32).view(2, BLOCKS)
        self.starts = torch.tensor([0, 1, 2], dtype=torch.int32)
        self.lengths = torch.tensor([size + 1, 1], dtype=torch.int32)
        self.later = torch.tensor([(size + 1) // 2, BLOCKS * size], dtype=torch.int32)
        self.now = self.lengths.clone()
        device = backend.device.torch
        with torch.inference_mode():
            cache, here = backend.allocate(spec), canonical_states(spec, torch.device("cpu"))
            store.function(key.to(device), value.to(device), *cache.layers[0].values(), slots.to(device))
            store.reference(key, value, *here.layers[0].values(), slots)
        self.expected = partial(self._call, self.operation.reference, here, "cpu")
        self._there = [each.to(device) for each in (self.query, self.table, self.starts, self.now)]
        self._cache = cache

    def check(self) -> None:
        self.compare(self.run(), "")

    def run(self) -> Any:
        query, table, starts, lengths = self._there
        state = self._cache.layers[0]
        caches = state["key"], state["value"]
        with torch.inference_mode():
            return ops.paged_attention(
                query, *caches, table, starts, lengths, self.starts, self.now, None, self.options
            )

    def update(self, lengths: Tensor) -> dict[str, Tensor]:
        """Set the sequences' lengths, and return the host values for a replay."""
        self._there[3].copy_(lengths)
        self.now.copy_(lengths)
        return {"query_start_loc_host": self.starts.clone(), "kv_lens_host": lengths.clone()}

    def compare(self, found: Any, what: str) -> None:
        assert_agree(self.operation, self.dtype, found, self.expected(), what)

    def _call(self, function: Callable[..., Any], cache: StateMemory, device: str) -> Any:
        caches = cache.layers[0]["key"], cache.layers[0]["value"]
        lengths = self.starts, self.now, self.starts, self.now
        return function(self.query, *caches, self.table, *lengths, None, self.options)


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(each).removeprefix("torch.") for each in dtypes)
