"""A compiler that runs the optimized step without a graph and counts the runs."""

from __future__ import annotations

from torch import Tensor

from hal.drivers.compiler import Compiler, Form
from hal.execution.context import FormContext
from hal.execution.optimized_model import OptimizedModel
from hal.step import Batch, StepShape


class CountingForm(Form):
    """Runs steps of equal queries through the optimized step."""

    def __init__(self, context: FormContext) -> None:
        self.steps: list[StepShape] = []
        self._queries = context.config.queries
        self._model = OptimizedModel(context)

    def refusal(self, batch: Batch, shape: StepShape) -> str | None:
        if shape.queries not in self._queries or batch.logits_indices.shape[0] != shape.tokens:
            return f"a step of {shape} is not counted"
        return None

    def run(self, batch: Batch, shape: StepShape) -> Tensor:
        self.steps.append(shape)
        return self._model(batch, shape)


class CountingCompiler(Compiler):
    """The compiler ``counting``; see the module."""

    name = "counting"
    reads = frozenset({"passes", "queries"})

    def make(self, context: FormContext) -> CountingForm:
        return CountingForm(context)
