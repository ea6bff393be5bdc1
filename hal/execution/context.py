"""The arguments of a compiler's ``make``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import attrs

from hal.config import CompilationConfig
from hal.drivers.backend import Backend
from hal.drivers.compiler import Outputs
from hal.nn import CausalLM
from hal.nn.model import flat_outputs
from hal.step import ALL, NONE, Batch, Rows, StateMemory, StaticBatch, StepShape

Phase = Literal["decode", "prefill"]

OTHER_RANK = "another rank cannot capture or compile them, and its log says why"
"""The reason on the ranks that can."""


@attrs.frozen(eq=False)
class FormContext:
    """The arguments that a compiler creates a form from.

    Attributes:
        model: loaded on the backend.
        backend: runs the model.
        states: the model's states.
        config: the configuration of the form's phase.
        phase: ``decode`` for steps whose sequences all have the same small number of queries, ``prefill`` for others.
        max_sequences: the most sequences of a batch; None if unknown.
        max_length: the most tokens of a sequence.
        all_agree: returns whether all ranks that step together say yes; all of them call it. A rank that steps alone
            agrees with itself. With ``on_capture_error: eager``, ranks thereby run the same sizes eagerly.
    """

    model: CausalLM
    backend: Backend
    states: StateMemory
    config: CompilationConfig
    phase: Phase
    max_sequences: int | None
    max_length: int
    all_agree: Callable[[bool], bool] = bool

    @property
    def max_blocks(self) -> int:
        """The columns of the widest block table."""
        return self.states.spec.blocks_for(self.max_length)

    def static_batch(self, shape: StepShape, **sizes: Any) -> StaticBatch:
        """Return a batch of a shape in fixed memory, for this model and backend."""
        return StaticBatch(
            self.model.batch_type,
            shape,
            **{"max_blocks": self.max_blocks} | sizes,
            block_size=self.states.spec.block_size,
            device=self.backend.device.torch,
        )

    @property
    def rows(self) -> Rows:
        """The rows of logits that graphs of whole steps compute: all, if the model has any."""
        return ALL if self.model.has_logits else NONE

    def eagerly(self, batch: Batch, rows: Rows = NONE) -> Outputs:
        """Run a step with the model's Python code, with the logits of all tokens if ``rows`` is ALL."""
        found = flat_outputs(self.model, self.model(batch, self.states.layers))
        return found if rows is NONE else (*found, self.model.logits(found[0]))
