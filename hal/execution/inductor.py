"""Steps compiled by Inductor: once for one sequence, and once for any larger number."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from hal.compile.collective_calls import collectives_of_one
from hal.compile.inductor_backend import compile_step
from hal.compile.trace import StepSizes, trace_encoder, trace_step
from hal.drivers.compiler import Outputs, PhaseForm, Plan
from hal.errors import CompileError
from hal.execution.capture.capture_sizes import capture_sizes, queries_to_capture
from hal.execution.context import FormContext
from hal.nn import Encoder
from hal.step import StaticBatch, StepShape

log = logging.getLogger("hal.execution")

CompiledStep = Callable[[list[Tensor]], Outputs]


class InductorForm(PhaseForm):
    """Compiles the step for each number of queries, or an encoder's. It runs batches of any size, without padding.

    ``capture_sizes`` selects the two variants: 1 selects that for one sequence, any other size that for more. Without
    the first variant, a single sequence is padded to two.

    Raises:
        CompileError: the model cannot be traced or compiled, and ``on_capture_error`` is ``raise``.
    """

    def __init__(self, context: FormContext) -> None:
        self._context = context
        self._pairs: dict[int, StaticBatch] = {}
        self._one: dict[int, CompiledStep] = {}
        self._many: dict[int, CompiledStep] = {}
        make = self._compile_all if context.encoder is None else partial(self._compile_encoder, context.encoder)
        if isinstance(context.attempt(make, f"{context.phase} batches run uncaptured"), str):
            self._one.clear()
            self._many.clear()
            self.uncaptured = None

    def plan(self, batch: Any, shape: StepShape) -> Plan | str:
        if self.uncaptured is not None:
            return partial(self.uncaptured, batch)
        queries = shape.queries
        if queries in self._one and shape.sequences == 1:
            return lambda: self._one[queries](batch.tensors())
        if queries not in self._many:
            known = queries in self._one
            return "the compiled step takes a single sequence" if known else "no step is compiled for its query length"
        if shape.sequences > 1:
            return lambda: self._many[queries](batch.tensors())
        pair = self._pairs[queries]
        if refusal := pair.refusal(batch):
            return refusal

        def padded() -> Outputs:
            pair.fill(batch)
            for name, value in pair.host_values(batch).items():  # Graphs take host values as separate arguments.
                getattr(pair.batch, name).copy_(value)
            return self._many[queries](pair.batch.tensors())

        return padded

    def _compile_all(self) -> None:
        context, config = self._context, self._context.config
        sizes = capture_sizes(config, context.backend.limits.capture_sizes)
        for queries in queries_to_capture(config):
            self._pairs[queries] = context.static_batch(StepShape.uniform(2, queries))
            if 1 in sizes:
                self._one[queries] = self._compile(1, queries)
            if sizes[-1] > 1:
                self._many[queries] = self._compile(sizes[-1], queries)

    def _compile_encoder(self, encoder: Encoder) -> None:
        """Compile an encoder, whose step is traced for any number of tokens and sequences."""
        step = trace_encoder(encoder, whole=self._context.backend.inductor or ())
        collectives_of_one(step.graph)
        step.check_any_size(encoder)
        run = compile_step(step)
        self.uncaptured = lambda batch: run(batch.tensors())

    def _compile(self, sequences: int, queries: int) -> CompiledStep:
        context = self._context
        sizes = StepSizes(sequences, queries)
        step = trace_step(context.model, context.states, sizes, whole=context.backend.inductor or ())
        collectives_of_one(step.graph)
        if sequences > 1:
            step.check_any_size(context.model)
        log.info("compiling steps of %s", "one sequence" if sequences == 1 else "two or more sequences")
        compiled = compile_step(step)
        if pinned := step.specialized_axes:
            raise CompileError(
                f"the step cannot be compiled for other sizes than the example's: it fixes {', '.join(pinned)}",
                "add kernels for the operations that it runs, or use the compiler graph",
            )
        return compiled
