"""What a comparison finds. All of it is plain values, for tables and for JSON."""

from __future__ import annotations

import attrs

from hal.ops.tolerance import Error

OUTSIDE = "outside the layers"
"""Where embeddings, the last norm and the output projection are; their drift is that of the logits."""


@attrs.frozen
class Call:
    """One call of an operation by the model.

    Attributes:
        step: 0 is the prefill, and each decode step counts one more.
        number: of the call in its step, from 0.
        operation: its name.
        path: of the module that called it, or the model's class if that was the model itself.
        layer: the path of the numbered layer that it belongs to, such as ``model.layers.3``; or :data:`OUTSIDE`.
    """

    step: int
    number: int
    operation: str
    path: str
    layer: str


@attrs.frozen
class Outcome:
    """A call, what became of it on the second backend, and its arguments' shapes by name."""

    call: Call
    error: Error
    arguments: dict[str, str]
    results: tuple[str, ...]


@attrs.frozen
class Row:
    """A layer.

    Attributes:
        layer: its path, :data:`OUTSIDE`, or what else was compared.
        operations: calls that were compared; 0 where only states were.
        worst: that of the largest error.
        drift: how far the whole runs are apart there: the largest difference in a row of values, over the row's root
            mean square, of all steps.
        rounding: the same between two runs of the first that differ by rounding alone.
    """

    layer: str
    operations: int
    worst: Outcome | None
    drift: float
    rounding: float


@attrs.frozen
class Departure:
    """Where the whole runs first came further apart than rounding explains.

    Attributes:
        layer: as in :class:`Row`.
        step: as in :class:`Call`.
        drift: as in :class:`Row`, in this step.
        limit: what rounding explains.
    """

    layer: str
    step: int
    drift: float
    limit: float


@attrs.frozen
class Choice:
    """A token on which the two differ.

    Attributes:
        prompt: whose.
        step: as in :class:`Call`.
        first: the first's likeliest token.
        second: the second's.
        margin: by how much the two tokens' logits differ, in the run where they differ more.
        rounding: what rounding explains of that.
    """

    prompt: int
    step: int
    first: int
    second: int
    margin: float
    rounding: float

    @property
    def tie(self) -> bool:
        """Whether rounding explains it."""
        return self.margin <= self.rounding


@attrs.frozen
class Comparison:
    """All that was found.

    Attributes:
        first: the reference's name.
        second: the other's.
        steps: that were run, the prefill included.
        tokens: that were chosen.
        rows: by layer, in the order of the model; the logits come last.
        broken: the first call out of its tolerance.
        departure: the first place where the runs left rounding.
        choices: the tokens that differ.
        not_compared: operations whose results could not be, and why.
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
        """Whether everything is within tolerance."""
        return self.broken is None and self.departure is None and all(choice.tie for choice in self.choices)
