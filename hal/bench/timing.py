"""Timing in turns, so that drift of the machine affects all contenders alike."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence

import attrs

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
        rounds: number of rounds.
        warm: run an untimed step before each timed one, so that the processor's caches are filled as in a loop.
        synchronize: waits for the device.
        meet: waits for the other ranks, before a timed step.
        ended: called after each round with the number of rounds so far.
        clock: returns seconds.
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
