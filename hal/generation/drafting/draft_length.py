"""How many tokens to draft: measured acceptance, and the measured time of steps."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from statistics import median_low

import attrs

MEMORY = 0.98
"""What a step leaves of the weight of those before it, in the acceptance that decides."""
TIMES = 7
"""The latest times of a kind of step, whose median counts."""
FIRST = 3
"""How many plain steps are measured before tokens are drafted."""
AGAIN, SELDOM = 32, 256
"""After how many steps the other choice, to draft or not, is tried again, at first and at most."""
SHARE = 0.02
"""The part of the time that drafts which do not pay may cost."""
MARGIN = 1.03
"""How much faster steps with drafts have to be. Measured times differ by as much."""
START, MOST_SAVED = 1.0, 16.0
"""The plain steps that drafts may cost at first, and that they may cost at most after they saved as many."""
MOST_COST = 8.0
"""The plain steps that count at most for one step. Other programs may have delayed it."""


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


@attrs.define
class Pace:
    """What is known of the steps of about as many texts.

    Attributes:
        times: the latest seconds of steps by length.
        left: the steps until the next trial.
        between: the steps between trials.
        trial: the length that is tried, until a step has it; None for none.
        last: the length of the last step.
    """

    times: dict[int, deque[float]] = attrs.field(factory=lambda: defaultdict(lambda: deque(maxlen=TIMES)))
    left: int = AGAIN
    between: int = AGAIN
    trial: int | None = None
    last: int = 0

    def seconds(self, length: int) -> float:
        """Return the time of a step. Between lengths that were measured it is theirs; longer ones take no longer."""
        known = sorted(each for each, found in self.times.items() if found)
        below = max(each for each in known if each <= length)
        above = min((each for each in known if each >= length), default=below)
        low, high = median_low(self.times[below]), median_low(self.times[above])
        return low if below == above else low + (high - low) * (length - below) / (above - below)

    def wait(self) -> None:
        """End a trial. The next one is after twice as many steps."""
        self.between = self.left = min(2 * self.between, SELDOM)


class DraftLength:
    """Counts what is accepted, and chooses the number of tokens to draft that gives most tokens a second.

    For each number of texts in a step, rounded up to a power of two, it compares the lengths by the tokens to expect
    and the median time. The first steps are plain, then one has the fewest drafts. A choice that does not pay is tried
    again now and then, ever more seldom. An account in plain steps has what drafts saved or cost: while they cost more
    than ``SHARE`` of all steps, nothing is drafted.

    Args:
        lengths: the lengths to choose from, ascending, with the most as the last.
        adapt: whether to choose; else the length is always the most.
    """

    def __init__(self, lengths: Sequence[int], adapt: bool) -> None:
        self.most = lengths[-1]
        self._lengths, self._adapt = sorted({0, *lengths}), adapt
        self._drafted, self._accepted, self._steps = [0] * self.most, [0] * self.most, 0
        self._recent = [[0.5, 1.0] for _ in range(self.most)]  # accepted and drafted, both weighted
        self._paces: dict[int, Pace] = defaultdict(Pace)
        self._saved = START
        self._right = 0  # in the step that is not measured yet

    @property
    def acceptance(self) -> Acceptance:
        """What was counted so far. Any thread may read it."""
        return Acceptance(tuple(self._drafted), tuple(self._accepted), self._steps)

    def choose(self, texts: int) -> int:
        """Return how many tokens to draft for each of some texts."""
        if not self._adapt:
            return self.most
        pace = self._paces[_kind(texts)]
        if len(pace.times[0]) < FIRST or self._saved < 0:
            return 0
        fewest = self._lengths[1]
        if not any(found for length, found in pace.times.items() if length):
            return fewest
        paying = [
            MARGIN if not each else self._expected(each) * pace.seconds(0) / pace.seconds(each)
            for each in self._lengths
        ]
        best = self._lengths[paying.index(max(paying))]
        pace.left -= 1
        pace.trial = None if pace.left >= 0 else 0 if best else fewest
        return best if pace.trial is None else pace.trial

    def measured(self, texts: int, length: int, seconds: float) -> None:
        """Note the time of a step with a length, and of drafting for it."""
        pace, right = self._paces[_kind(texts)], self._right / texts
        begins, pace.last, self._right = bool(length and not pace.last), length, 0
        known, plain = pace.times[length], pace.times[0]
        # A model that drafts first runs the tokens of the plain steps.
        if not (begins and known and seconds > median_low(known)):
            known.append(seconds)
        if not length:
            self._saved = max(self._saved, min(self._saved + SHARE, START))
            if pace.trial == 0:
                pace.wait()
        elif plain:
            cost, usual = (each / median_low(plain) for each in (seconds, median_low(known)))
            self._saved = min(self._saved + 1 + right - min(cost if begins else usual, MOST_COST), MOST_SAVED)
            if pace.trial and 1 + right <= usual:  # Else it goes on.
                pace.wait()
        pace.trial = None

    def counted(self, drafted: int, accepted: int) -> None:
        """Count the drafted tokens of one text in a step, and how many of them the model agreed with."""
        if not drafted:
            return
        self._steps += 1
        self._right += accepted
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


def _kind(texts: int) -> int:
    return (texts - 1).bit_length()
