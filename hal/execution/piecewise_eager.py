"""Steps in pieces without a compiler: the model's own Python runs once for each bucket, and is stopped on its way.

Each call of a splitting operation is a marker. There the capture that is under way ends, and the model stays where it
is, in a greenlet; the next capture begins, and the model goes on in it, with fixed memory for the operation's results.
A replay launches a graph, calls the operation with the batch's own lengths and block tables, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import attrs
import torch
from torch import Tensor

from hal.errors import CaptureError
from hal.execution.captured_form import Bucket
from hal.execution.check_logits import check_logits
from hal.execution.noting import Eagerly, Kind, Marker, tensors_of
from hal.execution.stopping import Call, Stopping
from hal.execution.token_form import TokenForm
from hal.graph import Graph
from hal.step import Batch, StaticBatch, StepShape, fields_of

MOST_ROWS = 64
"""Rows of logits that a prefill gives at once; a step that wants more is run again for the others."""


@attrs.frozen
class _Part:
    """A graph, and the call behind it.

    Attributes:
        graph: up to the call.
        function: what is called; None if the step ends here.
        fixed: arguments that are always the same.
        fields: arguments that are fields of the batch, and their names.
        rows: arguments that go by tokens.
        results: where the results go, and whether they go by tokens.
    """

    graph: Graph
    function: Callable[..., Any] | None = None
    fixed: dict[str, Any] = attrs.Factory(dict)
    fields: dict[str, str] = attrs.Factory(dict)
    rows: dict[str, Tensor] = attrs.Factory(dict)
    results: tuple[tuple[Tensor, bool], ...] = ()


class PiecewiseEagerForm(TokenForm):
    """The model's own Python, captured between the splitting operations that it calls. See :class:`TokenForm`."""

    def prepare(self) -> Sequence[StaticBatch]:
        (largest,) = super().prepare()
        context, most = self.context, largest.shape.tokens
        self._largest = largest
        self._of_steps = [
            name for name, each in fields_of(context.model.batch_type).items()
            if name != "logits_indices" and (each.twin_of is not None or not each.only_tokens)
        ]  # fmt: skip
        self._at = context.backend.splitting_ops(context.config)
        states = (tensor for _, tensor in context.states.tensors())
        self._weights = {id(each) for each in (*context.model.parameters(), *context.model.buffers(), *states)}
        self._wanted: dict[int, Tensor] = {}
        with torch.inference_mode():
            self._markers = self._run_eagerly().markers(most)
            self._memory = self._make_memory(most)
        self.num_graphs = len(self._markers) + 1
        return [largest]

    def describe(self) -> str:
        return f"{self.num_graphs} pieces of the model's own Python"

    def walk(self, largest: StaticBatch) -> Callable[[], Any]:
        return partial(self.context.eagerly, self._batch(largest.shape.tokens))

    def _run_eagerly(self) -> Eagerly:
        made = cache(self._batch)
        return Eagerly(
            type(self.context.model).__name__,
            lambda size: self.context.eagerly(made(size)),
            lambda size: self._weights | {id(getattr(made(size), name)) for name in self._of_steps},
            self._at,
        )

    def _batch(self, size: int) -> Batch:
        """A batch of the first rows of the fixed one, with lengths of its own."""
        decodes, spec = self.context.phase == "decode", self.context.states.spec
        sequences = size if decodes else 1
        length = min(size // sequences, spec.num_tokens)
        made = self.context.static_batch(
            StepShape(size, sequences, length), max_blocks=1 if decodes else spec.blocks_for(size), rows=sequences,
            length=length,
        )  # fmt: skip
        # As many rows of logits in every bucket of prefill, so that they are not taken for tokens.
        rows = size if decodes else min(self._largest.shape.tokens, MOST_ROWS)
        fixed = self._largest.first(StepShape(size, 0, 0)).by_token
        wanted = (torch.arange(rows) % size).to(self.context.backend.device.torch)
        return attrs.evolve(made.batch, **fixed, logits_indices=wanted)

    def capture_bucket(self, bucket: Bucket, pool: Any) -> Any:
        size, context = bucket.shape.tokens, self.context
        batch = self._batch(size)
        self._wanted[size] = batch.logits_indices
        fields = {id(getattr(batch, name)): name for name in self._of_steps}
        model = Stopping(partial(context.eagerly, batch), self._at, fields)
        given: Any = None
        try:
            for marker in self._markers:
                graph = context.backend.graph()
                bucket.graphs.append(graph)
                graph.capture(partial(model.resume, given, marker.arguments), pool=pool)
                pool = graph.pool
                part = self._part(graph, marker, model.call, fields, size)
                bucket.parts.append(part)
                slots = [memory[:size] if by_token else memory for memory, by_token in part.results]
                given = tuple(slots) if marker.several else slots[0] if slots else None
                del slots
            graph = context.backend.graph()
            bucket.graphs.append(graph)
            graph.capture(partial(model.resume, given, ()), pool=pool)
            check_logits(context.model, graph.outputs, batch)  # of which a step takes as many rows as it wants
            bucket.parts.append(self._part(graph, None, model.call, fields, size))
        finally:
            model.stop()
        return graph.pool

    def _part(
        self, graph: Graph, marker: Marker | None, call: Call | None, fields: Mapping[int, str], size: int
    ) -> _Part:
        found, expected = (None if each is None else _name_of(each) for each in (call, marker))
        shapes = {} if marker is None else {name: kind.at(size) for name, kind in marker.arguments.items()}
        if found != expected or shapes != {name: tuple(each.shape) for name, each in _outputs(graph, call).items()}:
            raise CaptureError(
                f"for {size} tokens, {type(self.context.model).__name__} calls {found or 'nothing'} where it called "
                f"{expected or 'nothing'} for {self._largest.shape.tokens}, or with tensors of another kind",
                'let it do the same for all sizes, or use the compiler "eager"',
            )
        if marker is None or call is None:
            return _Part(graph)
        of_batch = {name: fields[id(each)] for name, each in call.arguments.items() if id(each) in fields}
        rows: dict[str, Tensor] = graph.outputs
        constant = {name: each for name, each in call.arguments.items() if name not in of_batch and name not in rows}
        constant |= {name: row for name, row in rows.items() if not marker.arguments[name].by_token}
        return _Part(
            graph, call.operation.function, constant, of_batch,
            {name: row for name, row in rows.items() if marker.arguments[name].by_token},
            tuple((self._memory[each], each[0].by_token) for each in zip(marker.results, marker.places, strict=True)),
        )  # fmt: skip

    def run_bucket(self, bucket: Bucket, batch: Batch) -> Tensor:
        bucket.static.fill_tokens(batch)
        wanted, memory = batch.logits_indices, self._wanted[bucket.shape.tokens]
        if wanted.shape[0] <= memory.shape[0]:
            return self._run_for(bucket, batch, wanted)
        # Again for each so many rows: with the same tokens a step does the same.
        return torch.cat([self._run_for(bucket, batch, rows).clone() for rows in wanted.split(memory.shape[0])])

    def _run_for(self, bucket: Bucket, batch: Batch, wanted: Tensor) -> Tensor:
        tokens, count = batch.num_tokens, wanted.shape[0]
        self._wanted[bucket.shape.tokens][:count] = wanted
        part: _Part
        for part in bucket.parts:
            part.graph.replay()
            if part.function is None:
                break
            given = {name: getattr(batch, field) for name, field in part.fields.items()}
            given |= {name: row[:tokens] for name, row in part.rows.items()}
            results = tensors_of(part.function(**part.fixed, **given))
            for (memory, by_token), result in zip(part.results, results, strict=True):
                (memory[:tokens] if by_token else memory).copy_(result)
        logits: Tensor = part.graph.outputs[:count]
        return logits

    def _make_memory(self, most: int) -> dict[tuple[Kind, int], Tensor]:
        """Where the results of splitting operations lie for graphs to read, in all buckets."""
        device = self.context.backend.device.torch
        kinds = {pair for each in self._markers for pair in zip(each.results, each.places, strict=True)}
        return {(kind, place): torch.zeros(kind.at(most), dtype=kind.dtype, device=device) for kind, place in kinds}


def _outputs(graph: Graph, call: Call | None) -> dict[str, Tensor]:
    return {} if call is None else graph.outputs


def _name_of(what: Call | Marker) -> str:
    return what.operation if isinstance(what, Marker) else what.operation.name
