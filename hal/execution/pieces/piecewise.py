"""The ``piecewise`` form: captured pieces for numbers of tokens, and splitting operations between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor

from hal.compile.optimize import OptimizedStep, optimize_model
from hal.compile.split import SplitStep, operation_of, split
from hal.compile.trace import StepSizes
from hal.device.graph import Graph
from hal.drivers.compiler import Outputs, Plan
from hal.errors import ConfigError
from hal.execution.capture.captured_form import Bucket, TokenForm
from hal.step import Batch, StaticBatch, fields_of

Values = dict[str, Tensor]


@attrs.frozen
class _Piece:
    """A segment of a bucket: its graph, if captured, and the memory of its outputs."""

    graph: Graph | None
    rows: Values


class PiecewiseForm(TokenForm):
    """The optimized step, split at the splitting operations; every other piece is a graph. See :class:`TokenForm`.

    Attributes:
        optimized: the step before the split, with the report of its passes.
        split: the segments.
    """

    optimized: OptimizedStep | None = None
    split: SplitStep | None = None

    def prepare(self) -> Sequence[StaticBatch]:
        (largest,) = super().prepare()
        context = self.context
        backend = context.backend
        sizes = StepSizes(None, tokens=largest.shape.tokens)
        step = optimize_model(context.model, context.states, sizes, backend, context.config.passes)
        self.optimized = step
        step.traced.check_any_size(context.model)
        present = {name for node in step.traced.graph.graph.nodes if (name := operation_of(node)) is not None}
        at = backend.splitting_ops(context.config, present)
        if missing := sorted(at - present):
            raise ConfigError(
                f"splitting_ops has {', '.join(missing)}, which the optimized step does not call",
                f"remove the name, or disable the pass that fuses it; the step calls {', '.join(sorted(present))}",
            )
        step.hoist(backend, keep=at)
        self.split = split(step.traced, at=at)
        self.uncaptured = self._without_graphs
        self.num_graphs = sum(each.captured for each in self.split.segments)
        if not self.num_graphs:
            raise ConfigError("nothing can be captured between the splitting operations", "split at fewer operations")
        with torch.inference_mode():
            self._rows = self._make_rows(largest.shape.tokens)
        return [largest]

    def warm_up(self, largest: StaticBatch) -> Callable[[], Any]:
        return partial(self._without_graphs, largest.batch)

    def _without_graphs(self, batch: Batch) -> Outputs:
        """Run a step of any shape on the code that was split."""
        assert self.split is not None
        values = _values_of(batch)
        expiring: dict[int, list[str]] = defaultdict(list)
        for index, segment in enumerate(self.split.segments):
            results = segment.run(*[values[name] for name in segment.inputs])
            for output, result in zip(segment.outputs, results, strict=True):
                values[output.name] = result
                expiring[output.last].append(output.name)
            del results
            for name in expiring.pop(index, ()):
                del values[name]
        return tuple(values[name] for name in self.split.returned)

    def plan_bucket(self, bucket: Bucket, batch: Batch) -> Plan:
        return partial(self._run, bucket, batch)

    def _run(self, bucket: Bucket, batch: Batch) -> Outputs:
        assert self.split is not None
        bucket.static.fill_tokens(batch)
        tokens = batch.num_tokens
        values = _values_of(batch)
        for segment, part in zip(self.split.segments, bucket.parts, strict=True):
            if part.graph is not None:
                part.graph.replay()
                for output in segment.outputs:
                    row = part.rows[output.name]
                    whole = output.row is None or tokens == bucket.shape.tokens
                    values[output.name] = row if whole else row[:tokens]
                continue
            results = segment.run(*[values[name] for name in segment.inputs])
            for output, result in zip(segment.outputs, results, strict=True):
                if (row := part.rows.get(output.name)) is not None:
                    result = row[:tokens].copy_(result)  # Later pieces read the result, and any writes to it, here.
                values[output.name] = result
        return tuple(values[name] for name in self.split.returned)

    def capture_bucket(self, bucket: Bucket, pool: Any) -> Any:
        assert self.split is not None
        values: Values = dict(bucket.static.by_token)
        holding: list[tuple[int, Graph]] = []
        for index, segment in enumerate(self.split.segments):
            graph = None
            names = [each.name for each in segment.outputs]
            if segment.captured:
                graph = self.context.backend.graph()
                bucket.graphs.append(graph)
                inputs = [values[name] for name in segment.inputs]
                graph.capture(partial(segment.run, *inputs), pool=pool, reserve_outputs=True)
                pool = graph.pool
                rows = dict(zip(names, graph.outputs, strict=True))
                holding.append((max((each.last for each in segment.outputs), default=0), graph))
            else:
                rows = {name: row[: bucket.shape.tokens] for name in names if (row := self._rows.get(name)) is not None}
            values |= rows
            bucket.parts.append(_Piece(graph, rows))
            for _, held in (each for each in holding if each[0] <= index):
                held.release_outputs()
            holding = [each for each in holding if each[0] > index]
        for _, held in holding:
            held.release_outputs()
        return pool

    def _make_rows(self, tokens: int) -> Values:
        """Return the memory for results that pieces read from eager segments. Values with disjoint lifetimes share."""
        assert self.split is not None
        segments, device = self.split.segments, self.context.backend.device.torch
        rows: Values = {}
        taken: dict[tuple[Any, ...], list[tuple[int, Tensor]]] = defaultdict(list)
        read = {name for each in segments if each.captured for name in each.inputs}
        for index, segment in enumerate(segments):
            for output in segment.outputs:
                if segment.captured or output.name not in read or output.row is None:
                    continue
                # Rows past a step's tokens keep older values. Of indices, only those of the same tensor are valid.
                kind = (output.row, output.dtype, None if output.dtype.is_floating_point else output.name)
                free = next((each for each in taken[kind] if each[0] < index), None)
                if free is not None:
                    taken[kind].remove(free)
                    row = free[1]
                else:
                    row = torch.zeros(tokens, *output.row, dtype=output.dtype, device=device)
                taken[kind].append((output.last, row))
                rows[output.name] = row
        return rows


def _values_of(batch: Batch) -> Values:
    return {name: getattr(batch, name) for name in fields_of(type(batch))}
