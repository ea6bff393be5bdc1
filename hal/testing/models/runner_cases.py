"""Cases of runners: padding, buckets and block boundaries, in every compile mode of the backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import attrs

from hal.drivers.compiler_registry import EAGER
from hal.testing.case import Case, require
from hal.testing.models.model_cases import SLOW, ModelRun
from hal.testing.models.plans import Plan
from hal.testing.target import Target

MakePlan = Callable[[int], Plan]
"""Creates a plan for a block size."""


def _padding(size: int) -> Plan:
    """Return steps of three sequences in a bucket of four, and of one sequence in a bucket of one."""
    return Plan((3, 9, 4, 20, 6), ((0, 1, 2), (4,), (2, 1, 0), (3,), (1, 2, 4)), seed=2)


def _buckets(size: int) -> Plan:
    """Return steps of every batch size from one to above the largest bucket, and back."""
    rows = tuple(range(6))
    sizes = (1, 2, 3, 4, 5, 6, 5, 4, 3, 2, 1)
    return Plan((4, 2, 7, 1, 12, 5), tuple(rows[:count] for count in sizes), seed=3)


def _block_edges(size: int) -> Plan:
    """Return prompts that end before, at and after the end of a block, and decode steps that cross it."""
    return Plan((size - 2, size - 1, size, size + 1), ((0, 1, 2, 3),) * 4, seed=4)


def _two_blocks(size: int) -> Plan:
    """Return prompts that end at the end of a second block."""
    return Plan((2 * size - 1, 2 * size), ((0, 1), (1, 0), (0,)), seed=5)


def _order(size: int) -> Plan:
    """Return steps in which sequences change rows or are absent."""
    return Plan((2, 30, 8, 15), ((0, 1, 2, 3), (3, 2, 1, 0), (1, 3), (2, 0, 1), (0, 3, 2, 1)), seed=6)


def _mixed(size: int) -> Plan:
    """Return steps with prompts before, among and after running sequences."""
    steps = ((0, 1), (2, 0, 1), (1, 3, 0), (2,), (4, 0, 3, 2, 5), (5, 0))
    return Plan((3, 9, 11, 20, 1, 6), steps, seed=7, first=(0, 1))


def _queries(count: int, size: int) -> Plan:
    """Return steps of several queries per sequence, as in speculative decoding, below, at and above the buckets."""
    steps = ((0, 1, 2), (3,), (2, 1, 0, 4), (4, 3), (0, 1, 2, 3, 4))
    return Plan((3, size - 1, 4, 20, 6), steps, seed=8, queries=count)


def _shared_queries(count: int, size: int) -> Plan:
    """Return such steps for sequences that share blocks and whose total length exceeds the cache."""
    lengths = (5 * size + 3, 5 * size + 1, 6 * size, 5 * size + 9)
    return Plan(lengths, ((0, 1, 2, 3), (2, 0, 1), (3,), (1, 3)), seed=9, queries=count, shared=5 * size)


PLANS: dict[str, MakePlan] = {
    "padding": _padding,
    "buckets": _buckets,
    "block-edges": _block_edges,
    "second-block": _two_blocks,
    "order": _order,
}
QUERIES = (2, 4, 8)
"""Query lengths per sequence; compilers that take seconds per model are tested with the first."""


def cases(target: Target) -> Iterator[Case]:
    """Yield ``runners/<compiler>/<plan>``."""
    dtype = target.backend.limits.dtypes[0]
    for mode in target.backend.compilers:
        run = ModelRun(target, "qwen3", dtype, mode)
        for name, make_plan in PLANS.items():
            yield Case(f"runners/{mode}/{name}", partial(_check, run, make_plan))
        yield Case(f"runners/{mode}/mixed", partial(_check_mixed, run))
        counts = QUERIES[:1] if mode in SLOW else QUERIES
        several = attrs.evolve(run, queries=counts) if _captures_queries(run) else run
        for count in counts:
            for name, of_count in (("queries", _queries), ("shared-queries", _shared_queries)):
                yield Case(f"runners/{mode}/{name}-{count}", partial(_check, several, partial(of_count, count)))


def _captures_queries(run: ModelRun) -> bool:
    """Return whether the compiler captures steps of several queries per sequence."""
    return run.mode != EAGER and "queries" in run.target.backend.compiler(run.mode).reads


def _check(run: ModelRun, make_plan: MakePlan) -> None:
    run.check_plan(make_plan(run.block_size))


def _check_mixed(run: ModelRun) -> None:
    """Check mixed steps; if the compiler captures steps of any shape, no step may run the model's Python code."""
    calls: list[object] = []
    watched = run.shared_runner().model.register_forward_pre_hook(lambda module, given: calls.append(module))
    try:
        run.check_plan(_mixed(run.block_size))
    finally:
        watched.remove()
    require(not (run.any_shape and calls), f"{len(calls)} steps ran the model's Python code, not a captured graph")
