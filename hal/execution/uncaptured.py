"""Steps that no form runs, as optimized code or as the module's Python code.

Importing hal.compile takes seconds, so only optimized code imports it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
from torch import Tensor

from hal.drivers.compiler import Outputs
from hal.execution.context import FormContext


@attrs.define(eq=False)
class Uncaptured:
    """A phase's step and its logits for any number of tokens: optimized code, or the module's Python.

    Attributes:
        context: the phase. Each rank decides alone about a module that cannot be traced.
        optimizes: whether optimized code runs.
        step: the optimized step; a form that has it may set it.
    """

    context: FormContext
    optimizes: bool
    step: Callable[[Any], Outputs] | None = None
    _logits: Callable[..., Outputs] | None = None

    def prepare(self) -> None:
        """Trace and optimize the step for all sizes at once, unless that is done.

        Raises:
            CompileError: the module cannot be traced, or a pass failed.
        """
        if self.step is None and self.optimizes:
            from hal.execution.optimized_model import step_of_any_size

            self.step = self._made(partial(step_of_any_size, self.context))

    def same(self, other: Uncaptured) -> bool:
        """Return whether both run the same code of the model, so that one serves both phases."""
        first, second = self.context, other.context
        settings = [(each.config.passes, each.refuses) for each in (first, second)]
        return self.optimizes == other.optimizes and settings[0] == settings[1]

    def run(self, batch: Any) -> Outputs:
        """Return the hidden states and the extra tensors of a batch, or the embeddings of an encoder's."""
        self.prepare()
        return self.context.eagerly(batch) if self.step is None else self.step(batch)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states, ``[rows, width]``."""
        if self._logits is None and self.optimizes:
            from hal.execution.optimized_model import logits_of_any_size

            self._logits = self._made(partial(logits_of_any_size, self.context, hidden))
        return self.context.model.logits(hidden) if self._logits is None else self._logits(hidden)[0]

    def _made(self, make: Callable[[], Callable[..., Outputs]]) -> Callable[..., Outputs] | None:
        name = type(self.context.module).__name__
        made = self.context.attempt(make, f"steps that no graph holds run the Python code of {name}")
        if isinstance(made, str):
            self.optimizes = False
            return None
        return made
