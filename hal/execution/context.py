"""What a compiler is given to make a form of."""

from __future__ import annotations

from typing import Any, Literal

import attrs
from torch import Tensor

from hal.config import CompilationConfig
from hal.drivers.backend import Backend
from hal.nn import CausalLM
from hal.step import Batch, StateMemory, StaticBatch, StepShape

Phase = Literal["decode", "prefill"]


@attrs.frozen(eq=False)
class FormContext:
    """What a compiler makes a form of.

    Attributes:
        model: loaded on the backend.
        backend: that runs it.
        states: that the model writes.
        config: of the steps that the form is for.
        phase: the configuration's key for those steps: ``decode`` for steps whose sequences all have the same small
            number of queries, ``prefill`` for all others.
        max_sequences: that a batch will hold at most; None if nobody says.
        max_length: tokens that a sequence will hold at most.
    """

    model: CausalLM
    backend: Backend
    states: StateMemory
    config: CompilationConfig
    phase: Phase
    max_sequences: int | None
    max_length: int

    @property
    def max_blocks(self) -> int:
        """Columns of the widest block table."""
        return self.states.spec.blocks_for(self.max_length)

    def static_batch(self, shape: StepShape, **sizes: Any) -> StaticBatch:
        """A batch of a shape on fixed memory, for this model and backend."""
        return StaticBatch(
            self.model.batch_type, shape, **{"max_blocks": self.max_blocks} | sizes,
            block_size=self.states.spec.block_size, device=self.backend.device.torch,
        )  # fmt: skip

    def eagerly(self, batch: Batch) -> Tensor:
        """Run a step by the model's own Python."""
        logits: Tensor = self.model(batch, self.states.layers)
        return logits
