"""Steps in pieces: captured graphs for numbers of tokens, and between them what cannot be captured."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor

from hal.batch import Batch
from hal.compile.optimise import OptimisedStep, optimise_model
from hal.compile.split import SplitStep, operation_of, split
from hal.compile.trace import example_batch
from hal.errors import ConfigError
from hal.graph import Graph
from hal.runtime.tokens import BY_TOKEN, FIELDS, TokenBucket, TokenStep

Values = dict[str, Tensor]


@attrs.frozen
class _Part:
    """A segment of a bucket: its graph, if it was captured, and where its outputs lie for pieces to read."""

    graph: Graph | None
    rows: Values


class PiecewiseStep(TokenStep):
    """The optimised step, split at the splitting operations; every other piece is a graph. See :class:`TokenStep`.

    Attributes:
        optimised: the step before it was split, and the report of its passes.
        split: its segments.
    """

    optimised: OptimisedStep | None = None
    split: SplitStep | None = None

    def _run(self, bucket: TokenBucket, batch: Batch) -> Tensor:
        assert self.split is not None
        tokens = batch.num_tokens
        values: Values = {name: getattr(batch, name) for name in FIELDS}
        for segment, part in zip(self.split.segments, bucket.parts, strict=True):
            if part.graph is not None:
                part.graph.replay()
                for output in segment.outputs:
                    row = part.rows[output.name]
                    values[output.name] = row if output.row is None or tokens == bucket.size else row[:tokens]
                continue
            results = segment.run(*[values[name] for name in segment.inputs])
            for output, result in zip(segment.outputs, results, strict=True):
                if (row := part.rows.get(output.name)) is not None:
                    result = row[:tokens].copy_(result)  # what a piece writes there is for later readers to see
                values[output.name] = result
        return values[self.split.logits]

    def _prepare(self, most: int) -> None:
        backend = self._backend
        # All sizes differ, so that they are different ones in the trace.
        example = example_batch(11, 3, 5, columns=7, device=backend.device.torch)
        step = optimise_model(self._model, example, self._cache.layers, backend, self._config.passes, any_size=True)
        self.optimised = step
        step.traced.demand_any_size(self._model)
        graph = step.traced.graph.graph
        at = backend.splitting_ops(self._config)
        present = {name for node in graph.nodes if (name := operation_of(node)) is not None}
        if missing := sorted(at - present):
            raise ConfigError(
                f"splitting_ops has {', '.join(missing)}, which the optimised step does not call",
                f"leave it out, or turn off the pass that took it in; the step calls {', '.join(sorted(present))}",
            )
        step.hoist(backend, keep=at)
        self.split = split(graph, FIELDS, step.traced.fixed, at=at, by_token=BY_TOKEN)
        self.num_pieces = sum(each.captured for each in self.split.segments)
        if not self.num_pieces:
            raise ConfigError("nothing can be captured between the splitting operations", "split at fewer operations")
        with torch.inference_mode():
            self._rows = self._make_rows(most)

    def _walk(self) -> None:
        assert self.split is not None
        values: Values = {name: getattr(self._fixed, name) for name in FIELDS}
        for segment in self.split.segments:
            results = segment.run(*[values[name] for name in segment.inputs])
            values.update(zip((each.name for each in segment.outputs), results, strict=True))

    def _capture_bucket(self, bucket: TokenBucket, pool: Any) -> Any:
        assert self.split is not None
        values: Values = {name: getattr(self._fixed, name)[: bucket.size] for name in BY_TOKEN}
        holding: list[tuple[int, Graph]] = []
        for index, segment in enumerate(self.split.segments):
            graph = None
            names = [each.name for each in segment.outputs]
            if segment.captured:
                graph = self._backend.graph()
                bucket.graphs.append(graph)
                inputs = [values[name] for name in segment.inputs]
                graph.capture(partial(segment.run, *inputs), pool=pool, hold=True)
                pool = graph.pool
                rows = dict(zip(names, graph.outputs, strict=True))
                holding.append((max((each.last for each in segment.outputs), default=0), graph))
            else:
                rows = {name: row[: bucket.size] for name in names if (row := self._rows.get(name)) is not None}
            values |= rows
            bucket.parts.append(_Part(graph, rows))
            for _, held in (each for each in holding if each[0] <= index):
                held.let_go()
            holding = [each for each in holding if each[0] > index]
        for _, held in holding:
            held.let_go()
        return pool

    def _make_rows(self, tokens: int) -> Values:
        """Memory for what runs between pieces to leave its results in for them. Values that do not meet share it."""
        assert self.split is not None
        segments = self.split.segments
        rows: Values = {}
        taken: dict[tuple[Any, ...], list[tuple[int, Tensor]]] = defaultdict(list)
        read = {name for each in segments if each.captured for name in each.inputs}
        for index, segment in enumerate(segments):
            for output in segment.outputs:
                if segment.captured or output.name not in read or output.row is None:
                    continue
                kind = (output.row, output.dtype)
                free = next((each for each in taken[kind] if each[0] < index), None)
                if free is not None:
                    taken[kind].remove(free)
                    row = free[1]
                else:
                    row = torch.zeros(tokens, *output.row, dtype=output.dtype, device=self._backend.device.torch)
                taken[kind].append((output.last, row))
                rows[output.name] = row
        return rows
