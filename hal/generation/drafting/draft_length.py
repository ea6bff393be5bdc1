"""How many tokens to draft: measured acceptance, and the measured time of steps."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from statistics import median

import attrs

MEMORY = 0.98
"""What a step leaves of the weight of those before it, in the acceptance that decides."""
TIMES = 7
"""The latest times of a kind of step, whose median counts."""
FIRST = 3
"""How many times each kind of step is measured before it is compared."""
AGAIN, SELDOM = 32, 1024
"""After how many steps a length that does not pay is tried again, at first and at most."""


@attrs.frozen
class Acceptance:
    """How many drafted tokens the model agreed with, by place.

    Attributes:
        drafted: the drafted tokens at each place behind a text, the next one first.
        accepted: those of them that the model also chose, as all before them.
        steps: the steps of one text in which tokens were drafted.
    """

    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    steps: int

    @property
    def rate(self) -> float:
        """The fraction of drafted tokens that were accepted; 0 if there were none."""
        return sum(self.accepted) / max(sum(self.drafted), 1)

    @property
    def by_place(self) -> tuple[float, ...]:
        """The fraction at each place."""
        return tuple(some / max(all_, 1) for some, all_ in zip(self.accepted, self.drafted, strict=True))

    def __str__(self) -> str:
        places = ", ".join(f"{100 * each:.0f} %" for each in self.by_place)
        return f"accepted {sum(self.accepted)} of {sum(self.drafted)} drafted tokens; by place: {places}"

    def since(self, before: Acceptance) -> Acceptance:
        """Return what was counted after ``before``."""
        drafted = tuple(new - old for new, old in zip(self.drafted, before.drafted, strict=True))
        accepted = tuple(new - old for new, old in zip(self.accepted, before.accepted, strict=True))
        return Acceptance(drafted, accepted, self.steps - before.steps)


class DraftLength:
    """Counts what is accepted, and chooses the number of tokens to draft that gives most tokens a second.

    For each number of texts in a step, rounded up to a power of two, it compares the lengths by the tokens to expect
    and the median time. A length that was not measured has the time between its neighbours'. A length that does not
    pay is measured again now and then, ever more seldom.

    Args:
        lengths: the lengths to choose from, ascending, with the most as the last.
        adapt: whether to choose; else the length is always the most.
    """

    def __init__(self, lengths: Sequence[int], adapt: bool) -> None:
        self.most = lengths[-1]
        self._lengths, self._adapt = sorted({0, *lengths}), adapt
        self._drafted, self._accepted, self._steps = [0] * self.most, [0] * self.most, 0
        self._recent = [[0.5, 1.0] for _ in range(self.most)]  # accepted and drafted, both weighted
        self._times: dict[int, dict[int, deque[float]]] = defaultdict(lambda: defaultdict(lambda: deque(maxlen=TIMES)))
        self._waits: dict[int, tuple[int, int]] = {}  # steps until the next trial, and between trials

    @property
    def acceptance(self) -> Acceptance:
        """What was counted so far. Any thread may read it."""
        return Acceptance(tuple(self._drafted), tuple(self._accepted), self._steps)

    def choose(self, texts: int) -> int:
        """Return how many tokens to draft for each of some texts."""
        if not self._adapt:
            return self.most
        times = self._times[_kind(texts)]
        for each in (self.most, 0):
            if len(times[each]) < FIRST:
                return each
        best = max(self._lengths, key=lambda length: self._expected(length) / self._seconds(times, length))
        left, between = self._waits.get(_kind(texts), (AGAIN, AGAIN))
        if best and left:  # Drafting is measured as it goes, so that plain steps are tried only.
            self._waits[_kind(texts)] = left - 1, between
            return best
        if left:
            self._waits[_kind(texts)] = left - 1, between
            return 0
        self._waits[_kind(texts)] = (twice := min(2 * between, SELDOM)), twice
        return 0 if best else next((each for each in self._lengths if each), self.most)

    def measured(self, texts: int, length: int, seconds: float) -> None:
        """Note the time of a step with a length, and of drafting for it."""
        self._times[_kind(texts)][length].append(seconds)

    def counted(self, drafted: int, accepted: int) -> None:
        """Count the drafted tokens of one text in a step, and how many of them the model agreed with."""
        if not drafted:
            return
        self._steps += 1
        for place in range(min(drafted, self.most)):
            self._drafted[place] += 1
            self._accepted[place] += place < accepted
            if place <= accepted:  # Behind a wrong token, a place says nothing.
                recent = self._recent[place]
                recent[0] = recent[0] * MEMORY + (place < accepted)
                recent[1] = recent[1] * MEMORY + 1

    def _expected(self, length: int) -> float:
        """Return how many tokens a text gets in a step."""
        total = reached = 1.0
        for some, all_ in self._recent[:length]:
            reached *= some / all_
            total += reached
        return total

    def _seconds(self, times: dict[int, deque[float]], length: int) -> float:
        known = sorted(each for each, found in times.items() if found)
        below, above = max(each for each in known if each <= length), min(each for each in known if each >= length)
        low, high = median(times[below]), median(times[above])
        return low if below == above else low + (high - low) * (length - below) / (above - below)


def _kind(texts: int) -> int:
    return (texts - 1).bit_length()
