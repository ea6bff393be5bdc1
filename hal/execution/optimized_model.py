"""A model's step as optimized code: of given shapes, for captures, or of any size, for steps without a form."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from hal.compile.optimize import OptimizedStep, kept_whole, optimize, optimize_model
from hal.compile.trace import StepSizes, trace_encoder, trace_logits
from hal.drivers.compiler import Outputs
from hal.execution.context import FormContext
from hal.step import NONE, Batch, Rows, StepShape

Lowered = Callable[..., Outputs]


class OptimizedModel:
    """Runs steps of equal query lengths on the graphs that the backend's passes produce.

    Attributes:
        optimized: the optimized step of each shape; most shapes share one.

    Raises:
        CompileError: the model cannot be traced, or a pass failed. ``prepare`` or the first step of a shape raises it.
    """

    def __init__(self, context: FormContext) -> None:
        self._context = context
        self._lowered: list[tuple[OptimizedStep, Lowered]] = []
        self._steps: dict[StepShape, Lowered] = {}
        self.optimized: dict[StepShape, OptimizedStep] = {}

    def prepare(self, shape: StepShape) -> Lowered:
        """Trace and optimize the step for ``shape``, unless a previous one serves it.

        Returns:
            A function from a batch's tensors, in the order of its fields, to what the step returns.
        """
        if self._context.encoder is not None:
            shape = StepShape(0, 0, 0)  # One trace serves all.
        if shape not in self._steps:
            known = next((each for each in self._lowered if each[0].traced.serves(shape)), None)
            if known is None:
                known = self._optimize(shape)
                self._lowered.append(known)
            self.optimized[shape], self._steps[shape] = known
        return self._steps[shape]

    def _optimize(self, shape: StepShape) -> tuple[OptimizedStep, Lowered]:
        context = self._context
        step = optimized_step(context, StepSizes(shape.sequences, shape.queries), context.rows)
        if context.encoder is not None:
            step.traced.check_any_size(context.encoder)
        step.hoist(context.backend)
        return step, step.lowered()

    def __call__(self, batch: Batch, shape: StepShape) -> Outputs:
        """Return what the step of a batch computes, logits included."""
        return self.prepare(shape)(*batch.tensors())


def optimized_step(context: FormContext, sizes: StepSizes, rows: Rows = NONE) -> OptimizedStep:
    """Trace the step of a phase and rewrite it for the backend.

    Args:
        context: the phase.
        sizes: the sizes to trace for. An encoder is always traced for any size.
        rows: the rows of logits that the step computes, too.

    Raises:
        CompileError: the module cannot be traced, or a pass failed.
    """
    model, backend, passes = context.model, context.backend, context.config.passes
    if context.encoder is None:
        return optimize_model(model, context.states, sizes, backend, passes, rows)
    trace = partial(trace_encoder, context.encoder, whole=kept_whole(backend), decompose=False)
    return optimize(trace, backend, passes)


def step_of_any_size(context: FormContext) -> Callable[[Any], Outputs]:
    """Return the optimized step of a phase, for batches of any size.

    Raises:
        CompileError: the module cannot be traced, or a pass failed.
    """
    step = optimized_step(context, StepSizes(None, tokens=context.backend.config.max_prefill_tokens))
    lowered = step.for_any_size(context.module, context.backend)
    return lambda batch: lowered(*batch.tensors())


def logits_of_any_size(context: FormContext, hidden: Tensor) -> Lowered:
    """Return the optimized code of a phase's logits, for any number of rows of hidden states.

    Args:
        context: the phase.
        hidden: its width and dtype are those of hidden states.

    Raises:
        CompileError: the model cannot be traced, or a pass failed.
    """
    model, backend = context.model, context.backend
    trace = partial(trace_logits, model, hidden, whole=kept_whole(backend), decompose=False)
    return optimize(trace, backend, context.config.passes).for_any_size(model, backend)
