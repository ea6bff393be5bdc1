"""Comparison of contenders: a check that all compute the same logits, and timing in turns.

In turns, drift of the machine affects all contenders alike.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence

import attrs
import torch
from torch import Tensor

from hal.bench.plan import BenchmarkError
from hal.bench.workload import Contender


def interleave(
    contenders: Sequence[Contender],
    rounds: int,
    *,
    warm: bool,
    synchronize: Callable[[], None],
    meet: Callable[[], None] = lambda: None,
    ended: Callable[[int], None] = lambda rounds: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Time one step of each contender per round, and return seconds by name, in the order of rounds.

    Every other round runs backwards, so that a contender does not always follow the same one. The garbage collector
    runs only between rounds.

    Args:
        contenders: contenders with distinct names.
        warm: run an untimed step before each timed one, so that the processor's caches are filled as in a loop.
        meet: waits for the other ranks, before a timed step.
        ended: called after each round with the number of rounds so far.
    """
    seconds: dict[str, list[float]] = {each.name: [] for each in contenders}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for round_ in range(rounds):
            gc.collect()
            for each in reversed(contenders) if round_ % 2 else contenders:
                if warm:
                    each.reset()
                    each.step()
                each.reset()
                meet()
                synchronize()
                start = clock()
                each.step()
                synchronize()
                seconds[each.name].append(clock() - start)
            ended(round_ + 1)
    finally:
        if collecting:
            gc.enable()
    return seconds


@attrs.frozen
class Summary:
    """Median and quartiles of durations in seconds."""

    median: float
    first_quartile: float
    third_quartile: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Summary:
        """Summarize at least two durations."""
        first, median, third = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(median, first, third)

    @property
    def spread(self) -> float:
        """Return the interquartile range in seconds."""
        return self.third_quartile - self.first_quartile


def noisy(one: Summary, other: Summary) -> bool:
    """Return whether the medians differ by less than either sample's spread."""
    return abs(one.median - other.median) < max(one.spread, other.spread)


TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1.5e-1}
"""Largest difference attributed to rounding, by the dtype of the weights.

Rounding is 6e-2 in bfloat16 for 28 layers of random weights; omitting one of 512 cached tokens gives 3e-1.
"""


@attrs.frozen
class Agreement:
    """The difference of a contender's logits from the first contender's.

    Attributes:
        difference: largest norm of the difference of a sequence's logits, relative to the norm of the first's logits.
        tolerance: largest difference allowed.
        same_tokens: number of sequences with the same most likely token.
    """

    contender: str
    difference: float
    tolerance: float
    same_tokens: int
    sequences: int


def check(contenders: Sequence[Contender], dtype: torch.dtype) -> list[Agreement]:
    """Run a step of each comparable contender and compare its logits with the first one's.

    Raises:
        BenchmarkError: logits differ by more than rounding.
    """
    reference, *others = [each for each in contenders if each.comparable]
    expected = _logits(reference)
    return [_compare(reference.name, expected, each.name, _logits(each), TOLERANCE[dtype]) for each in others]


def _logits(contender: Contender) -> Tensor:
    contender.reset()
    return contender.logits(contender.step()).float().cpu().clone()  # a replay overwrites its logits


def _compare(reference: str, expected: Tensor, name: str, found: Tensor, tolerance: float) -> Agreement:
    if found.shape != expected.shape:
        raise BenchmarkError(
            f"{name} returned logits {list(found.shape)}, and {reference} {list(expected.shape)}",
            "exclude one of them, and report this",
        )
    difference = float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
    if not difference <= tolerance:  # also if it is NaN
        raise BenchmarkError(
            f"{name} and {reference} do not compute the same: their logits differ by {difference:.2g} of their norm, "
            f"and the tolerance is {tolerance:.2g}; nothing was timed",
            "compare them in float32 (--dtype float32); if they still differ, one of them is wrong: report it",
        )
    same = int((found.argmax(-1) == expected.argmax(-1)).sum())
    return Agreement(name, difference, tolerance, same, len(expected))
