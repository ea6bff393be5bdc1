"""The drift between whole runs, per layer and step, and its comparison with rounding."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import attrs
from torch import Tensor

from hal.compare.comparison_results import Choice, Departure
from hal.compare.texts import most_likely
from hal.errors import NumericsError
from hal.ops.rounding import DRIFT_RATIO, DRIFT_TIE_RATIO, drift, margin, rms

LOGITS = "logits"

State = Mapping[str, Tensor]
"""Values by layer name, with rows in the last dimension; the logits are the last entry."""


@attrs.frozen
class _Differing:
    """A :class:`Choice` whose rounding is not known yet; ``size`` is the RMS of the logits, which scales it."""

    prompt: int
    step: int
    first: int
    second: int
    margin: float
    size: float


class Drifts:
    """Collects, per step, the drift between two runs, and the drift that rounding causes in the first."""

    def __init__(self) -> None:
        self._found: dict[str, list[float]] = defaultdict(list)
        self._rounding: dict[str, list[float]] = defaultdict(list)
        self._steps = 0
        self._differing: list[_Differing] = []

    def step(self, first: State, second: State, rounding: tuple[State, State], prompts: list[int]) -> list[int]:
        """Add the states of a step.

        Args:
            first: states of the reference.
            second: states of the other run.
            rounding: states of two runs that differ only by rounding.
            prompts: prompt of each row of the logits.

        Returns:
            The reference's most likely tokens.

        Raises:
            NumericsError: the reference's logits contain NaN.
        """
        if first[LOGITS].isnan().any():
            raise NumericsError(
                f"the reference's logits contain NaN in step {self._steps}",
                "use the other one as reference, or another --dtype; float16 overflows more easily than the others",
            )
        step, self._steps = self._steps, self._steps + 1
        for name, expected in first.items():
            self._found[name].append(drift(second[name], expected))
            self._rounding[name].append(drift(rounding[1][name], rounding[0][name]))
        ours, theirs = most_likely(first[LOGITS]), most_likely(second[LOGITS])
        for row, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            if mine != other:
                apart = margin((first[LOGITS][row], second[LOGITS][row]), mine, other)
                size = float(rms(first[LOGITS][row]))
                self._differing.append(_Differing(prompts[row], step, mine, other, apart, size))
        return ours

    @property
    def layers(self) -> list[str]:
        """Return the layers in the order of the first step."""
        return list(self._found)

    def largest(self, layer: str) -> float:
        """Return the largest drift of a layer over all steps."""
        return max(self._found[layer], default=0.0)

    def rounding(self, layer: str) -> float:
        """Return the same for the disturbed run."""
        return max(self._rounding[layer], default=0.0)

    def limit(self, layer: str) -> float:
        """What rounding explains."""
        return DRIFT_RATIO * self.rounding(layer)

    def departure(self) -> Departure | None:
        """Return the first step and layer whose drift exceeds rounding, or None."""
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
