"""What of a runner sleeps, and what it gave back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import attrs

from hal.checkpoint.weight_release import ReleasedWeights, dropped_weights
from hal.errors import AsleepError
from hal.nn import CausalLM

Part = Literal["weights", "caches"]
"""What sleeps."""


@attrs.frozen
class Slept:
    """What a runner gave back.

    Attributes:
        weights: the bytes of weights that the device got back.
        caches: those of caches and other states.
        addresses_kept: whether all addresses stay, so that graphs remain valid. Otherwise, waking captures them again.
    """

    weights: int
    caches: int
    addresses_kept: bool

    def __str__(self) -> str:
        graphs = "addresses are kept, and graphs stay" if self.addresses_kept else "waking captures graphs again"
        return f"gave back {self.weights >> 20} MiB of weights and {self.caches >> 20} MiB of caches; {graphs}"

    @classmethod
    def sum(cls, parts: Sequence[Slept]) -> Slept:
        """Return what several runners gave back."""
        weights, caches = sum(each.weights for each in parts), sum(each.caches for each in parts)
        return cls(weights, caches, all(each.addresses_kept for each in parts))


@attrs.define(eq=False)
class Sleep:
    """The sleep of a runner. Any thread may ask for its error.

    Attributes:
        parts: what sleeps.
        weights: the weights, if they sleep.
    """

    parts: frozenset[Part]
    weights: ReleasedWeights | None

    def error(self, model: CausalLM) -> AsleepError:
        """Return the error of a step."""
        if parts := sorted(self.parts):
            return AsleepError(
                f"the runner of {type(model).__name__} sleeps: its {' and '.join(parts)} gave back their memory",
                "call hal.wake, or wake() of the hal.LLM",
            )
        dropped = dropped_weights(model)
        return AsleepError(
            f"{len(dropped)} weights of {type(model).__name__} were dropped as it slept: {', '.join(dropped[:3])}",
            "pass all weights to replace_weights, those of a drafter too",
        )
