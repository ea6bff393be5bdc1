"""Cases of graphs whose kernels read host values, such as sequence lengths, that change between replays."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hal import ops
from hal.drivers.backend import Backend
from hal.errors import HostValueError
from hal.ops.declaration.constraints import Draw
from hal.ops.tolerance import assert_agree, error
from hal.step.state import StateSpec
from hal.testing.case import require

ROWS, BLOCKS_EACH, HEADS, KV_HEADS = 5, 3, 4, 2
CHAINED = 4.0
"""Times the tolerance: the second attention is given four times what the first gives, and so passes its rounding on. In
graphs a driver may have another kernel than for eager calls."""


class Attend:
    """Two attention calls over a random cache; the second one's query depends on the first one's result."""

    def __init__(self, backend: Backend, seed: int = 7) -> None:
        self.backend = backend
        limits, size = backend.limits, backend.block_size
        dtype, dims = limits.dtypes[0], limits.head_dims
        head_dim = 64 if not dims or 64 in dims else dims[0]
        draw = Draw(dtype, backend.device.torch, seed)
        self.options = ops.AttentionOptions(head_dim**-0.5)
        self.query = draw.normal(ROWS, HEADS, head_dim)
        self.caches = _filled(backend, draw, head_dim)
        self.table = draw.permutation(ROWS * BLOCKS_EACH).view(ROWS, BLOCKS_EACH)
        self.starts = torch.arange(ROWS + 1, dtype=torch.int32)
        self.lens = torch.ones(ROWS, dtype=torch.int32)
        # Clone: if the device is the host, the device tensors must not share memory with the host values.
        self.device_starts, self.device_lens = (each.clone().to(draw.device) for each in (self.starts, self.lens))
        self.lengths = [
            [1, 1, 1, 1, 1],
            [5, size + 2, 3 * size, 2, size - 1],
            [6, size + 3, size + 1, 3, size],
            [3 * size, 2, size - 1, 5, size + 2],
            [9, 0, 2 * size, 0, 0],
            [0] * ROWS,
            [1, 2, 3, 4, 5],
        ]
        self.graph = backend.graph()

    def _call(self, query: Tensor, lens: Tensor) -> Tensor:
        return ops.paged_attention(
            query,
            *self.caches,
            self.table,
            self.device_starts,
            self.device_lens,
            self.starts,
            lens,
            None,
            self.options,
        )

    def twice(self, lens: Tensor | None = None) -> Tensor:
        """Return the result of the captured function; with ``lens``, run it eagerly with these lengths."""
        lens = self.lens if lens is None else lens
        return self._call(self._call(self.query, lens) * 4 + self.query, lens)

    def captured(self) -> Tensor:
        """Capture the function and return the graph's output."""
        output: Tensor = self.graph.capture(self.twice)
        lost = [name for name in ops.operation("paged_attention").host if name not in self.graph.host_values]
        require(
            not lost,
            f"the capture did not record {' and '.join(lost)}, which paged_attention declares with host=; record each "
            "host value of every call, including values that the kernel reads on the device",
        )
        return output

    def set(self, lens: list[int]) -> dict[str, Any]:
        """Write the lengths to the device, and return the host values."""
        values = torch.tensor(lens, dtype=torch.int32)
        self.device_lens.copy_(values)
        return {"kv_lens_host": values, "query_start_loc_host": self.starts.clone()}

    def eager(self, lens: list[int]) -> Tensor:
        """Return the eager result."""
        values = self.set(lens)
        with torch.inference_mode():
            return self.twice(values["kv_lens_host"]).cpu()


def _filled(backend: Backend, draw: Draw, head_dim: int) -> tuple[Tensor, Tensor]:
    blocks, size = ROWS * BLOCKS_EACH, backend.block_size
    state = backend.allocate(StateSpec.key_value(1, KV_HEADS, head_dim, draw.dtype, blocks, size)).layers[0]
    cache = state["key"], state["value"]
    values = draw.normal(blocks * size, KV_HEADS, head_dim), draw.normal(blocks * size, KV_HEADS, head_dim)
    with torch.inference_mode():
        ops.store_kv_cache(*values, *cache, torch.arange(blocks * size, dtype=torch.int32, device=draw.device))
    return cache


def _agrees(attend: Attend, found: Tensor, lens: list[int], what: str) -> None:
    operation = ops.operation("paged_attention")
    what = f"of {what} with lengths {lens}"
    assert_agree(operation, attend.query.dtype, found, attend.eager(lens), what, times=CHAINED)


def _differ(attend: Attend, one: Tensor, other: Tensor) -> bool:
    return error(ops.operation("paged_attention"), attend.query.dtype, one, other, times=CHAINED).ratio > 1


def lengths_change(backend: Backend) -> None:
    """Check that each replay uses its lengths."""
    attend = Attend(backend)
    results = [attend.eager(lens) for lens in attend.lengths]
    require(
        all(_differ(attend, *pair) for pair in itertools.pairwise(results)),
        "attention gives the same for other lengths, even without a graph",
    )
    output = attend.captured()
    for lens in attend.lengths:
        attend.graph.replay(**attend.set(lens))
        _agrees(attend, output.clone(), lens, "a replay")


def without_waiting(backend: Backend) -> None:
    """Check that replays use their lengths if the caller does not synchronize between them."""
    attend = Attend(backend)
    output, found = attend.captured(), []
    for lens in attend.lengths:
        attend.graph.replay(**attend.set(lens))
        found.append(output.clone())
    backend.device.synchronize()
    for lens, each in zip(attend.lengths, found, strict=True):
        _agrees(attend, each, lens, "a replay without synchronization")


def overwritten(backend: Backend) -> None:
    """Check that the caller may overwrite the host values once replay() has returned."""
    attend = Attend(backend)
    output = attend.captured()
    for lens in attend.lengths[1:4]:
        values = attend.set(lens)
        attend.graph.replay(**values)
        values["kv_lens_host"].fill_(1)
        values["query_start_loc_host"].fill_(0)
        _agrees(attend, output.clone(), lens, "a replay whose values were overwritten afterwards")


def as_lists(backend: Backend) -> None:
    """Check that host values may be lists of integers."""
    attend = Attend(backend)
    output = attend.captured()
    lens = attend.lengths[1]
    attend.graph.replay(**{name: value.tolist() for name, value in attend.set(lens).items()})
    _agrees(attend, output.clone(), lens, "a replay whose values were lists")


def _refuses(change: Callable[[Tensor], dict[str, Tensor]]) -> Callable[[Backend], None]:
    """Return the check that a replay is refused whose lengths ``change`` gives under these names."""

    def check(backend: Backend) -> None:
        attend = Attend(backend)
        output = attend.captured()
        values = attend.set(attend.lengths[1])
        backend.device.synchronize()
        with torch.inference_mode():
            output.fill_(64.0)
        lens, refused = values.pop("kv_lens_host"), False
        try:
            attend.graph.replay(**values, **change(lens))
        except HostValueError:
            refused = True
        backend.device.synchronize()
        require(refused, "replay() accepted invalid host values; it must raise HostValueError")
        require(bool((output.cpu() == 64.0).all()), "replay() refused the host values, but launched work")
        attend.graph.replay(**attend.set(attend.lengths[2]))
        _agrees(attend, output.clone(), attend.lengths[2], "a replay after a refused one")

    return check


def two_graphs(backend: Backend) -> None:
    """Check that two graphs keep separate lengths."""
    one, other = Attend(backend, seed=1), Attend(backend, seed=2)
    first = one.captured()
    second = other.graph.capture(other.twice, pool=one.graph.pool)
    for mine, theirs in zip(one.lengths, reversed(one.lengths), strict=True):
        one.graph.replay(**one.set(mine))
        found = first.clone()
        other.graph.replay(**other.set(theirs))
        _agrees(other, second.clone(), theirs, "the second of two graphs")
        _agrees(one, found, mine, "the first of two graphs")


CHECKS: dict[str, Callable[[Backend], None]] = {
    "lengths": lengths_change,
    "without-waiting": without_waiting,
    "overwritten": overwritten,
    "lists": as_lists,
    "two-graphs": two_graphs,
    "misspelt": _refuses(lambda lens: {"kv_lens": lens}),
    "unknown": _refuses(lambda lens: {"kv_lens_host": lens, "no_such_value": lens}),
    "missing": _refuses(lambda lens: {}),
    "short": _refuses(lambda lens: {"kv_lens_host": lens[:-1]}),
    "dtype": _refuses(lambda lens: {"kv_lens_host": lens.float()}),
}
"""Checks by case name."""
