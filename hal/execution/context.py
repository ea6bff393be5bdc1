"""The arguments of a compiler's ``make``, and what follows a capture or compilation that fails."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import attrs

from hal.config import CompilationConfig
from hal.drivers.backend import Backend
from hal.drivers.compiler import Outputs
from hal.errors import CaptureError, CompileError
from hal.nn import CausalLM, Encoder
from hal.nn.model import flat_outputs
from hal.step import ALL, NONE, Rows, StateMemory, StaticBatch, StepShape

log = logging.getLogger("hal.execution")

Phase = Literal["decode", "prefill", "encoder"]
T = TypeVar("T")


@attrs.frozen(eq=False)
class FormContext:
    """The arguments that a compiler creates a form from.

    Attributes:
        model: loaded on the backend.
        backend: runs the model.
        states: the model's states.
        config: the configuration of the form's phase.
        phase: ``decode`` for steps whose sequences all have the same small number of queries, ``prefill`` for others,
            ``encoder`` for those of the model's encoder.
        max_sequences: the most sequences of a batch; None if unknown.
        max_length: the most tokens of a sequence.
        all_agree: returns whether all ranks that step together say yes; all of them call it. A rank that steps alone
            agrees with itself.
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
    def encoder(self) -> Encoder | None:
        """The encoder, in its phase; else None."""
        return self.model.encoder if self.phase == "encoder" else None

    @property
    def module(self) -> CausalLM | Encoder:
        """The module that the steps run: the model or its encoder."""
        return self.encoder or self.model

    @property
    def max_blocks(self) -> int:
        """The columns of the widest block table."""
        return self.states.spec.blocks_for(self.max_length)

    def static_batch(self, shape: StepShape, **sizes: Any) -> StaticBatch:
        """Return a batch of a shape in fixed memory, for this module and backend."""
        return StaticBatch(
            self.module.batch_type,
            shape,
            **{"max_blocks": self.max_blocks} | sizes,
            block_size=self.states.spec.block_size,
            device=self.backend.device.torch,
        )

    @property
    def rows(self) -> Rows:
        """The rows of logits that graphs of whole steps compute: all, if the module has any."""
        return ALL if self.encoder is None and self.model.has_logits else NONE

    def eagerly(self, batch: Any, rows: Rows = NONE) -> Outputs:
        """Run a step with the module's Python code, with the logits of all tokens if ``rows`` is ALL."""
        if self.encoder is not None:
            return (self.encoder(batch),)
        found = flat_outputs(self.model, self.model(batch, self.states.layers))
        return found if rows is NONE else (*found, self.model.logits(found[0]))

    @property
    def refuses(self) -> bool:
        """Whether a model that cannot be captured or compiled is refused, as ``on_capture_error`` says."""
        return self.config.on_capture_error == "raise"

    def attempt(self, make: Callable[[], T], otherwise: str) -> T | str:
        """Return what ``make`` returns, or why it cannot capture or compile, if ``on_capture_error`` is ``eager``.

        Ranks that step together all call it, and get a reason if one does: they run the same sizes.

        Args:
            make: captures or compiles. It returns no string.
            otherwise: the result of a failure, for a warning.

        Raises:
            CaptureError: as ``make`` raises it, if ``on_capture_error`` is ``raise``.
            CompileError: likewise.
        """
        made: T | str
        try:
            made = make()
        except (CaptureError, CompileError) as error:
            if self.refuses:
                raise
            made = str(error)  # A record may be kept, and the error's traceback would keep the runner.
        if self.refuses or self.all_agree(not isinstance(made, str)):
            return made
        reason = made if isinstance(made, str) else "another rank cannot capture or compile them, and its log says why"
        log.warning("%s: %s", otherwise, reason)
        return reason
