"""A compiler that runs the optimized step without a graph and counts the runs."""

from __future__ import annotations

from hal.drivers.compiler import Compiler, Outputs, PhaseForm, Plan
from hal.execution.context import FormContext
from hal.execution.optimized_model import OptimizedModel
from hal.step import Batch, StepShape


class CountingForm(PhaseForm):
    """Runs steps of equal queries through the optimized step."""

    def __init__(self, context: FormContext) -> None:
        self.steps: list[StepShape] = []
        self._queries = context.config.queries
        self._model = OptimizedModel(context)
        self.with_logits = context.model.has_logits

    def plan(self, batch: Batch, shape: StepShape) -> Plan | str:
        if shape.queries not in self._queries:
            return f"a step of {shape} is not counted"

        def run() -> Outputs:
            self.steps.append(shape)
            return self._model(batch, shape)

        return run


class CountingCompiler(Compiler):
    """The compiler ``counting``; see the module."""

    name = "counting"
    reads = frozenset({"passes", "queries"})

    def make(self, context: FormContext) -> CountingForm:
        return CountingForm(context)
