"""A model's step as an optimised function, traced again for sizes where its Python code behaves differently."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from hal.compile.optimise import OptimisedStep, optimise_model
from hal.compile.trace import StepSizes
from hal.execution.context import FormContext
from hal.step import Batch, StepShape

Lowered = Callable[..., tuple[Tensor]]


class OptimisedModel:
    """Runs steps of equal query lengths on the graphs that the backend's passes produce.

    Attributes:
        optimised: the optimised step of each shape; most shapes share one.

    Raises:
        CompileError: the model cannot be traced, or a pass failed. ``prepare`` or the first step of a shape raises it.
    """

    def __init__(self, context: FormContext) -> None:
        self._context = context
        self._lowered: list[tuple[OptimisedStep, Lowered]] = []
        self._steps: dict[StepShape, Lowered] = {}
        self.optimised: dict[StepShape, OptimisedStep] = {}

    def prepare(self, shape: StepShape) -> Lowered:
        """Trace and optimise the step for ``shape``, unless a previous one serves it.

        Returns:
            A function from a batch's tensors, in the order of its fields, to ``(logits,)``.
        """
        if shape not in self._steps:
            known = next((each for each in self._lowered if each[0].traced.serves(shape)), None)
            if known is None:
                known = self._optimise(shape)
                self._lowered.append(known)
            self.optimised[shape], self._steps[shape] = known
        return self._steps[shape]

    def _optimise(self, shape: StepShape) -> tuple[OptimisedStep, Lowered]:
        context = self._context
        sizes = StepSizes(shape.sequences, shape.queries)
        step = optimise_model(context.model, context.states, sizes, context.backend, context.config.passes)
        step.hoist(context.backend)
        return step, step.lowered()

    def __call__(self, batch: Batch, shape: StepShape) -> Tensor:
        """Return the logits of a batch."""
        (logits,) = self.prepare(shape)(*batch.tensors())
        return logits
