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


@attrs.define(eq=False)
class Uncaptured:
    """The model's step and its logits for any number of tokens: optimized code, or the model's Python.

    Attributes:
        model: the model.
        states: its states.
        backend: runs the steps.
        passes: the configured passes; None to run the model's Python code.
        otherwise_python: whether a model that cannot be traced runs as Python, after one warning.
        step: the optimized step; a form that has it may set it.
    """

    model: CausalLM
    states: StateMemory
    backend: Backend
    passes: Mapping[str, bool] | None
    otherwise_python: bool = False
    step: Callable[[Batch], Outputs] | None = None
    _logits: Callable[..., Outputs] | None = None

    def prepare(self) -> None:
        """Trace and optimize the step for all sizes at once, unless that is done.

        Raises:
            CompileError: the model cannot be traced, or a pass failed.
        """
        if self.step is None and self.passes is not None:
            self.step = self._made(partial(self._optimized_step, self.passes))

    def run(self, batch: Batch) -> Outputs:
        """Return the hidden states and the extra tensors of a batch."""
        self.prepare()
        if self.step is None:
            return flat_outputs(self.model, self.model(batch, self.states.layers))
        return self.step(batch)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states, ``[rows, width]``."""
        if self._logits is None and self.passes is not None:
            self._logits = self._made(partial(self._optimized_logits, hidden, self.passes))
        return self.model.logits(hidden) if self._logits is None else self._logits(hidden)[0]

    def _optimized_step(self, passes: Mapping[str, bool]) -> Callable[[Batch], Outputs]:
        sizes = StepSizes(None, tokens=self.backend.config.max_prefill_tokens)
        step = optimize_model(self.model, self.states, sizes, self.backend, passes)
        lowered = step.for_any_size(self.model, self.backend)
        return lambda batch: lowered(*batch.tensors())

    def _optimized_logits(self, hidden: Tensor, passes: Mapping[str, bool]) -> Callable[..., Outputs]:
        trace = partial(trace_logits, self.model, hidden, whole=kept_whole(self.backend), decompose=False)
        return optimize(trace, self.backend, passes).for_any_size(self.model, self.backend)

    def _made(self, make: Callable[[], Any]) -> Any:
        try:
            return make()
        except CompileError as error:
            if not self.otherwise_python:
                raise
            self.passes = None
            # A record may be kept, and the error's traceback would keep the runner.
            log.warning(
                "steps that no graph holds run the Python code of %s: %s", type(self.model).__name__, str(error)
            )
            return None
