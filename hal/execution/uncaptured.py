"""Steps that no form runs, and the logits of the rows that a caller asks for: optimized code that is not captured."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import attrs
from torch import Tensor

from hal.compile.optimize import kept_whole, optimize, optimize_model
from hal.compile.trace import StepSizes, trace_logits
from hal.drivers.backend import Backend
from hal.drivers.compiler import Outputs
from hal.errors import CompileError
from hal.nn import CausalLM
from hal.nn.model import flat_outputs
from hal.step import Batch, StateMemory

log = logging.getLogger("hal.execution")

Run = Callable[..., Outputs]


@attrs.define(eq=False)
class Uncaptured:
    """The model's step and its logits, traced and optimized when they first run.

    A model that cannot be traced for all sizes at once runs as Python, after one warning.

    Attributes:
        model: the model.
        states: its states.
        backend: runs the steps.
        passes: the configured passes; None to run the model's Python code.
    """

    model: CausalLM
    states: StateMemory
    backend: Backend
    passes: Mapping[str, bool] | None
    _step: Run | None = None
    _logits: Run | None = None

    def run(self, batch: Batch) -> Outputs:
        """Return the hidden states and the extra tensors of a batch."""
        if self._step is None and self.passes is not None:
            self._step = self._made(self._optimized_step)
        if self._step is None:
            return flat_outputs(self.model, self.model(batch, self.states.layers))
        return self._step(*batch.tensors())

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states, ``[rows, width]``."""
        if self._logits is None and self.passes is not None:
            self._logits = self._made(partial(self._optimized_logits, hidden, self.passes))
        if self._logits is None:
            return self.model.logits(hidden)
        return self._logits(hidden)[0]

    def _optimized_step(self) -> Run:
        assert self.passes is not None
        sizes = StepSizes(None, tokens=self.backend.config.max_prefill_tokens)
        step = optimize_model(self.model, self.states, sizes, self.backend, self.passes)
        step.traced.check_any_size(self.model)
        step.hoist(self.backend)
        return step.lowered()

    def _optimized_logits(self, hidden: Tensor, passes: Mapping[str, bool]) -> Run:
        trace = partial(trace_logits, self.model, hidden, whole=kept_whole(self.backend), decompose=False)
        step = optimize(trace, self.backend, passes)
        step.traced.check_any_size(self.model)
        step.hoist(self.backend)
        return step.lowered()

    def _made(self, make: Callable[[], Run]) -> Any:
        try:
            return make()
        except CompileError as error:
            self.passes = None
            # A record may be kept, and the error's traceback would keep the runner.
            log.warning(
                "steps that no graph holds run the Python code of %s: %s", type(self.model).__name__, str(error)
            )
            return None
