"""Timing in turns: what drifts on the machine drifts for all contenders alike."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence

import attrs

from hal.bench.contenders.workload import Contender


def interleave(
    contenders: Sequence[Contender],
    rounds: int,
    *,
    warm: bool,
    synchronize: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Time one step of each contender per round; seconds by name, in the order of rounds.

    Every other round goes backwards, so that nobody always follows the same neighbour. The garbage collector runs
    between rounds only.

    Args:
        contenders: with different names.
        rounds: how many.
        warm: let an untimed step of the contender go before each timed one, so that it finds in the processor's caches
            what a loop of its own would leave there.
        synchronize: waits for the device.
        clock: gives seconds.
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
                synchronize()
                start = clock()
                each.step()
                synchronize()
                seconds[each.name].append(clock() - start)
    finally:
        if collecting:
            gc.enable()
    return seconds


@attrs.frozen
class Summary:
    """The middle of a sample of seconds, and its quartiles."""

    median: float
    first_quartile: float
    third_quartile: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Summary:
        """Of at least two."""
        first, median, third = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(median, first, third)

    @property
    def spread(self) -> float:
        """The interquartile range, in seconds."""
        return self.third_quartile - self.first_quartile


def noisy(one: Summary, other: Summary) -> bool:
    """Whether the medians differ by less than either sample spreads, so that no claim should rest on it."""
    return abs(one.median - other.median) < max(one.spread, other.spread)
