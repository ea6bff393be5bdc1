"""How far whole runs come apart, layer by layer, and whether rounding explains it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import attrs
from torch import Tensor

from hal.compare.comparison_results import Choice, Departure
from hal.compare.texts import likeliest
from hal.errors import NumericsError
from hal.ops.rounding import DRIFT_RATIO, DRIFT_TIE_RATIO, drift, margin, rms

LOGITS = "logits"

State = Mapping[str, Tensor]
"""By the name of a layer, what stands for it, all rows of one kind of values; the logits come last."""


@attrs.frozen
class _Differing:
    """A :class:`Choice` before it is known what rounding explains: that goes by the logits' ``size``."""

    prompt: int
    step: int
    first: int
    second: int
    margin: float
    size: float


class Drifts:
    """Collects, step by step, how far two runs are apart, and how far rounding alone takes the first."""

    def __init__(self) -> None:
        self._found: dict[str, list[float]] = defaultdict(list)
        self._rounding: dict[str, list[float]] = defaultdict(list)
        self._steps = 0
        self._differing: list[_Differing] = []

    def step(self, first: State, second: State, rounding: tuple[State, State], prompts: list[int]) -> list[int]:
        """Take a step's states.

        Args:
            first: of the reference.
            second: of the other.
            rounding: of two runs that differ by rounding alone.
            prompts: whose the rows of the logits are.

        Returns:
            The reference's likeliest tokens.

        Raises:
            NumericsError: the reference gave NaN, with which nothing can be compared.
        """
        if first[LOGITS].isnan().any():
            raise NumericsError(
                f"the reference gave NaN logits in step {self._steps}",
                "name the other first, or compare in another dtype; float16 overflows where the others do not",
            )
        step, self._steps = self._steps, self._steps + 1
        for name, expected in first.items():
            self._found[name].append(drift(second[name], expected))
            self._rounding[name].append(drift(rounding[1][name], rounding[0][name]))
        ours, theirs = likeliest(first[LOGITS]), likeliest(second[LOGITS])
        for row, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            if mine != other:
                apart = margin((first[LOGITS][row], second[LOGITS][row]), mine, other)
                size = float(rms(first[LOGITS][row]))
                self._differing.append(_Differing(prompts[row], step, mine, other, apart, size))
        return ours

    @property
    def layers(self) -> list[str]:
        """In the order of the first step."""
        return list(self._found)

    def largest(self, layer: str) -> float:
        """The drift of all steps."""
        return max(self._found[layer], default=0.0)

    def rounding(self, layer: str) -> float:
        """The same of the disturbed run."""
        return max(self._rounding[layer], default=0.0)

    def limit(self, layer: str) -> float:
        """What rounding explains."""
        return DRIFT_RATIO * self.rounding(layer)

    def departure(self) -> Departure | None:
        """The first step, and in it the first layer, that rounding does not explain."""
        for step in range(self._steps):
            for layer, found in self._found.items():
                if found[step] > self.limit(layer):
                    return Departure(layer, step, found[step], self.limit(layer))
        return None

    def choices(self) -> tuple[Choice, ...]:
        """The tokens that differ."""
        explained = DRIFT_TIE_RATIO * self.rounding(LOGITS)
        return tuple(
            Choice(each.prompt, each.step, each.first, each.second, each.margin, explained * each.size)
            for each in self._differing
        )
