"""Whole steps as graphs: one per number of sequences, all of which have the same number of queries."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hal.device.graph import Graph
from hal.drivers.compiler import Outputs, Plan
from hal.errors import CompileError
from hal.execution.capture.capture_sizes import shapes_to_capture
from hal.execution.capture.captured_form import Bucket, CapturedForm
from hal.execution.context import FormContext
from hal.execution.optimized_model import OptimizedModel
from hal.step import ALL, StaticBatch, StepShape


class GraphMaker(ABC):
    """Captures the step of one shape, with the logits of all its tokens if the model computes any.

    A driver's compiler can replace it and reuse :class:`FullGraphForm`.
    """

    @abstractmethod
    def warm_up(self, static: StaticBatch) -> Callable[[], Any]:
        """Return a function that runs the step to capture eagerly, to warm the device up and measure its memory."""

    @abstractmethod
    def capture(self, static: StaticBatch, pool: Any) -> Graph:
        """Capture a step that reads ``static`` into the pool of the previous graphs (None for the first).

        Raises:
            CaptureError: the step cannot be captured.
            CompileError: the step cannot be compiled.
        """


class OptimizedGraphs(GraphMaker):
    """Captures the optimized step; above ``torch_compile_max_bs`` sequences, the model's Python code.

    Attributes:
        optimized: the optimized steps.
    """

    def __init__(self, context: FormContext) -> None:
        self._context = context
        self.optimized = OptimizedModel(context)

    def warm_up(self, static: StaticBatch) -> Callable[[], Any]:
        try:
            return self._call(static)
        except CompileError:
            if self._context.encoder is not None:
                raise  # One trace serves all sizes.
            return partial(self._context.eagerly, static.batch, self._context.rows)  # capture() reports the error.

    def capture(self, static: StaticBatch, pool: Any) -> Graph:
        graph = self._context.backend.graph()
        graph.host_names = static.twins
        graph.capture(self._call(static), pool=pool)
        return graph

    def _call(self, static: StaticBatch) -> Callable[[], Outputs]:
        limit, shape = self._context.config.torch_compile_max_bs, static.shape
        if limit is not None and shape.sequences > limit:
            return partial(self._context.eagerly, static.batch, self._context.rows)
        self.optimized.prepare(shape)
        return partial(self.optimized, static.batch, shape)


class FullGraphForm(CapturedForm):
    """Captures a whole step for each number of sequences, and replays the smallest that holds a batch.

    All buckets of a number of queries read their inputs from the memory of the largest one.
    """

    def __init__(self, context: FormContext, maker: GraphMaker) -> None:
        self.maker = maker
        self.with_logits = context.rows is ALL
        super().__init__(context)

    def prepare(self) -> Sequence[StaticBatch]:
        largest: dict[int, StaticBatch] = {}
        for shape in self.shapes_to_capture():
            if shape.queries not in largest:
                largest[shape.queries] = self.context.static_batch(shape)
        return list(largest.values())

    def shapes_to_capture(self) -> Sequence[StepShape]:
        return shapes_to_capture(self.context)

    def warm_up(self, largest: StaticBatch) -> Callable[[], Any]:
        return self.maker.warm_up(largest)

    def capture_bucket(self, bucket: Bucket, pool: Any) -> Any:
        graph = self.maker.capture(bucket.static, pool)
        bucket.graphs.append(graph)
        return graph.pool

    def plan_bucket(self, bucket: Bucket, batch: Any) -> Plan | str:
        if refusal := bucket.static.refusal(batch):
            return refusal
        graph = bucket.graphs[0]
        replay = graph.plan(bucket.static.host_values(batch, graph.host_values.tensors))
        if isinstance(replay, str):
            return replay

        def run() -> Outputs:
            bucket.static.fill(batch)
            outputs: Outputs = replay()
            return outputs

        return run
