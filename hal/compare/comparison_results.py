"""The results of a comparison as plain values, for tables and JSON."""

from __future__ import annotations

import attrs

from hal.errors import HalError
from hal.ops.tolerance import Error


class CompareError(HalError):
    """Two runs cannot be compared, for example because a kernel raises."""


OUTSIDE = "outside the layers"
"""Location of the embedding, the final norm and the output projection; its drift is that of the logits."""


@attrs.frozen
class Call:
    """A call of an operation by the model.

    Attributes:
        step: 0 for the prefill, then the number of the decode step.
        number: index of the call in its step.
        path: path of the module that makes the call, or the model's class name.
        layer: path of the numbered layer that contains the module, such as ``model.layers.3``; or :data:`OUTSIDE`.
    """

    step: int
    number: int
    operation: str
    path: str
    layer: str


@attrs.frozen
class Outcome:
    """A call, its error on the second backend, and descriptions of its arguments and results."""

    call: Call
    error: Error
    arguments: dict[str, str]
    results: tuple[str, ...]


@attrs.frozen
class Row:
    """The results of a layer.

    Attributes:
        layer: its path, :data:`OUTSIDE`, or the name of another state.
        operations: number of compared calls; 0 if only states are compared.
        worst: the call with the largest error.
        drift: difference of the whole runs: the largest difference in a row of values, divided by the row's RMS, over
            all steps.
        rounding: the same for two runs of the first backend that differ only by rounding.
    """

    layer: str
    operations: int
    worst: Outcome | None
    drift: float
    rounding: float


@attrs.frozen
class Departure:
    """The first place at which the drift of the whole runs exceeds rounding.

    Attributes:
        layer: as in :class:`Row`.
        step: as in :class:`Call`.
        drift: as in :class:`Row`, in this step.
        limit: drift that rounding explains.
    """

    layer: str
    step: int
    drift: float
    limit: float


@attrs.frozen
class Choice:
    """A token that differs between the runs.

    Attributes:
        step: as in :class:`Call`.
        first: the first run's most likely token.
        second: the second run's.
        margin: difference of the two tokens' logits, in the run where it is larger.
        rounding: margin that rounding explains.
    """

    prompt: int
    step: int
    first: int
    second: int
    margin: float
    rounding: float

    @property
    def tie(self) -> bool:
        """Return whether rounding explains the difference."""
        return self.margin <= self.rounding


@attrs.frozen
class Comparison:
    """The result of a comparison.

    Attributes:
        first: name of the reference.
        second: name of the other.
        steps: number of steps, including the prefill.
        rows: results by layer in the model's order; the logits are last.
        broken: first call out of tolerance.
        departure: first place where the drift exceeds rounding.
        not_compared: operations with results that cannot be compared, and why.
    """

    first: str
    second: str
    steps: int
    tokens: int
    rows: tuple[Row, ...]
    broken: Outcome | None
    departure: Departure | None
    choices: tuple[Choice, ...]
    not_compared: tuple[str, ...]

    @property
    def agrees(self) -> bool:
        """Return whether everything is within tolerance."""
        return self.broken is None and self.departure is None and all(choice.tie for choice in self.choices)


@attrs.frozen
class RankDifference:
    """A call of a rank whose result differs from the single device's by more than rounding explains.

    Attributes:
        call: the call; a collective if that joined the result.
        drift: as in :class:`Row`, for the result of the call.
        limit: drift that rounding explains.
    """

    call: Call
    drift: float
    limit: float


@attrs.frozen
class RankComparison:
    """The result of comparing a rank with a single device.

    Attributes:
        ranks: number of ranks that split the model.
        steps: number of steps, including the prefill.
        compared: number of compared results; after a collective, its result.
        partial: number of results that are parts of a sum, which is compared when a later collective adds them.
    """

    backend: str
    rank: int
    ranks: int
    steps: int
    tokens: int
    compared: int
    partial: int
    first: RankDifference | None
    choices: tuple[Choice, ...]

    @property
    def agrees(self) -> bool:
        """Return whether everything is within what rounding explains."""
        return self.first is None and all(choice.tie for choice in self.choices)
