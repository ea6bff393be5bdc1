"""Runners: padding, buckets, and the edges of the cache's blocks, in every mode that the backend offers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import attrs

from hal.drivers.compiler_registry import EAGER
from hal.testing.case import Case, require
from hal.testing.models.model_cases import SLOW, ModelRun
from hal.testing.models.plans import Plan
from hal.testing.target import Target

Planned = Callable[[int], Plan]
"""From the size of a block."""


def _padding(size: int) -> Plan:
    """Three sequences in a bucket of four; one alone, which needs none, in between."""
    return Plan((3, 9, 4, 20, 6), ((0, 1, 2), (4,), (2, 1, 0), (3,), (1, 2, 4)), seed=2)


def _buckets(size: int) -> Plan:
    """Every batch size from one to beyond the largest, and back."""
    rows = tuple(range(6))
    sizes = (1, 2, 3, 4, 5, 6, 5, 4, 3, 2, 1)
    return Plan((4, 2, 7, 1, 12, 5), tuple(rows[:count] for count in sizes), seed=3)


def _block_edges(size: int) -> Plan:
    """Prompts that end before, at and behind a block's end, and decode steps over it."""
    return Plan((size - 2, size - 1, size, size + 1), ((0, 1, 2, 3),) * 4, seed=4)


def _two_blocks(size: int) -> Plan:
    """The same at the end of a second block."""
    return Plan((2 * size - 1, 2 * size), ((0, 1), (1, 0), (0,)), seed=5)


def _order(size: int) -> Plan:
    """Sequences change their rows from step to step, and sit out some."""
    return Plan((2, 30, 8, 15), ((0, 1, 2, 3), (3, 2, 1, 0), (1, 3), (2, 0, 1), (0, 3, 2, 1)), seed=6)


def _mixed(size: int) -> Plan:
    """Prompts come in beside running sequences, before, among and after them."""
    steps = ((0, 1), (2, 0, 1), (1, 3, 0), (2,), (4, 0, 3, 2, 5), (5, 0))
    return Plan((3, 9, 11, 20, 1, 6), steps, seed=7, first=(0, 1))


def _queries(count: int, size: int) -> Plan:
    """Several new tokens a sequence, as a verifier of drafts has them: below, at and above the buckets."""
    steps = ((0, 1, 2), (3,), (2, 1, 0, 4), (4, 3), (0, 1, 2, 3, 4))
    return Plan((3, size - 1, 4, 20, 6), steps, seed=8, queries=count)


def _shared_queries(count: int, size: int) -> Plan:
    """The same, for sequences that share blocks and together are longer than the cache."""
    lengths = (5 * size + 3, 5 * size + 1, 6 * size, 5 * size + 9)
    return Plan(lengths, ((0, 1, 2, 3), (2, 0, 1), (3,), (1, 3)), seed=9, queries=count, shared=5 * size)


PLANS: dict[str, Planned] = {
    "padding": _padding, "buckets": _buckets, "block-edges": _block_edges, "second-block": _two_blocks, "order": _order,
}  # fmt: skip
QUERIES = (2, 4, 8)
"""Of a sequence in a step."""


def cases(target: Target) -> Iterator[Case]:
    """``runners/<compiler>/<plan>``"""
    dtype = target.backend.limits.dtypes[0]
    for mode in target.backend.compilers:
        run = ModelRun(target, "qwen3", dtype, mode)
        for name, planned in PLANS.items():
            yield Case(f"runners/{mode}/{name}", partial(_check, run, planned))
        yield Case(f"runners/{mode}/mixed", partial(_check_mixed, run))
        several = _of_queries(run)
        for count in QUERIES:
            for name, of_count in (("queries", _queries), ("shared-queries", _shared_queries)):
                yield Case(f"runners/{mode}/{name}-{count}", partial(_check, several, partial(of_count, count)))


def _of_queries(run: ModelRun) -> ModelRun:
    """The same, with whole steps of several queries captured, where that is what the compiler does."""
    if run.mode == EAGER or "queries" not in run.target.backend.compiler(run.mode).reads:
        return run
    return attrs.evolve(run, queries=QUERIES[:1] if run.mode in SLOW else QUERIES)


def _check(run: ModelRun, planned: Planned) -> None:
    run.check_plan(planned(run.block_size))


def _check_mixed(run: ModelRun) -> None:
    """Where steps of any shape are captured, none of these runs the model's own Python."""
    calls: list[object] = []
    watched = run.open().model.register_forward_pre_hook(lambda module, given: calls.append(module))
    try:
        run.check_plan(_mixed(run.block_size))
    finally:
        watched.remove()
    require(not (run.any_shape and calls), f"{len(calls)} steps ran the model's Python, and not what was captured")
