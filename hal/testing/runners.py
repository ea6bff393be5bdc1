"""Runners: padding, buckets, and the edges of the cache's blocks, in every mode that the backend offers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from hal.testing.case import Case
from hal.testing.models import ModelRun
from hal.testing.plans import Plan
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


PLANS: dict[str, Planned] = {
    "padding": _padding, "buckets": _buckets, "block-edges": _block_edges, "second-block": _two_blocks, "order": _order,
}  # fmt: skip


def cases(target: Target) -> Iterator[Case]:
    """``runners/<compiler>/<plan>``"""
    dtype = target.backend.limits.dtypes[0]
    for mode in target.backend.compilers:
        for name, planned in PLANS.items():
            yield Case(f"runners/{mode}/{name}", partial(_check, ModelRun(target, "qwen3", dtype, mode), planned))


def _check(run: ModelRun, planned: Planned) -> None:
    run.check_plan(planned(run.block_size))
