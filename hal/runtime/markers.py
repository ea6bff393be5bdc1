"""Steps in pieces without a compiler: the model's own Python runs once for each bucket, and is stopped on its way.

Each call of a splitting operation is a marker. There the capture that is under way ends, and the model stays where it
is, in a greenlet; the next capture begins, and the model goes on in it, with fixed memory for the operation's results.
A replay launches a graph, calls the operation with the batch's own lengths and block tables, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import attrs
import torch
from torch import Tensor

from hal.batch import Batch
from hal.errors import CaptureError
from hal.graph import Graph
from hal.runtime.logits import check_logits
from hal.runtime.noting import Eagerly, Kind, Marker, tensors_of
from hal.runtime.stopping import Call, Stopping
from hal.runtime.tokens import BY_TOKEN, FIELDS, TokenBucket, TokenStep

MOST_ROWS = 64
"""Rows of logits that a prefill gives at once; a step that wants more is run again for the others."""
OF_STEPS = tuple(name for name in FIELDS if name not in (*BY_TOKEN, "logits_indices"))
"""Fields of a batch that only splitting operations may read: they change their shapes from step to step."""


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


class MarkedStep(TokenStep):
    """The model's own Python, captured between the splitting operations that it calls. See :class:`TokenStep`."""

    what = "pieces, at markers,"

    def _prepare(self, most: int) -> None:
        self._at = self._backend.splitting_ops(self._config)
        tensors = (*self._model.parameters(), *self._model.buffers(), *(t for pair in self._cache.layers for t in pair))
        self._weights = {id(each) for each in tensors}
        self._wanted: dict[int, Tensor] = {}
        with torch.inference_mode():
            self._markers = self._run_eagerly().markers(most)
            self._memory = self._make_memory(most)
        self.num_pieces = len(self._markers) + 1

    def _walk(self) -> None:
        self._model(self._batch(self._fixed.num_tokens), self._cache.layers)

    def _run_eagerly(self) -> Eagerly:
        made = cache(self._batch)
        return Eagerly(
            type(self._model).__name__,
            lambda size: self._model(made(size), self._cache.layers),
            lambda size: self._weights | {id(getattr(made(size), name)) for name in OF_STEPS},
            self._at,
        )

    def _batch(self, size: int) -> Batch:
        """A batch of the first rows of the fixed one, with lengths of its own."""
        # As many rows of logits in every bucket of prefill, so that they are not taken for tokens.
        rows = size if self._phase == "decode" else min(self._fixed.num_tokens, MOST_ROWS)
        wanted = torch.arange(rows) % size
        fixed = {name: getattr(self._fixed, name)[:size] for name in BY_TOKEN}
        return attrs.evolve(self._inputs(size), **fixed, logits_indices=wanted.to(self._fixed.token_ids.device))

    def _capture_bucket(self, bucket: TokenBucket, pool: Any) -> Any:
        batch = self._batch(bucket.size)
        self._wanted[bucket.size] = batch.logits_indices
        fields = {id(getattr(batch, name)): name for name in OF_STEPS}
        model = Stopping(partial(self._model, batch, self._cache.layers), self._at, fields)
        given: Any = None
        try:
            for marker in self._markers:
                graph = self._backend.graph()
                bucket.graphs.append(graph)
                graph.capture(partial(model.resume, given, marker.arguments), pool=pool)
                pool = graph.pool
                part = self._part(graph, marker, model.call, fields, bucket.size)
                bucket.parts.append(part)
                slots = [memory[: bucket.size] if by_token else memory for memory, by_token in part.results]
                given = tuple(slots) if marker.several else slots[0] if slots else None
                del slots
            graph = self._backend.graph()
            bucket.graphs.append(graph)
            graph.capture(partial(model.resume, given, ()), pool=pool)
            check_logits(self._model, graph.outputs, batch)  # of which a step takes as many rows as it wants
            bucket.parts.append(self._part(graph, None, model.call, fields, bucket.size))
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
                f"for {size} tokens, {type(self._model).__name__} calls {found or 'nothing'} where it called "
                f"{expected or 'nothing'} for {self._fixed.num_tokens}, or with tensors of another kind",
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

    def _run(self, bucket: TokenBucket, batch: Batch) -> Tensor:
        wanted, memory = batch.logits_indices, self._wanted[bucket.size]
        if self._phase == "decode":
            return self._run_for(bucket, batch, wanted)
        # Again for each so many rows: with the same tokens a step does the same.
        return torch.cat([self._run_for(bucket, batch, rows) for rows in wanted.split(memory.shape[0])])

    def _run_for(self, bucket: TokenBucket, batch: Batch, wanted: Tensor) -> Tensor:
        tokens, count = batch.num_tokens, wanted.shape[0]
        self._wanted[bucket.size][:count] = wanted
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
        return logits if self._phase == "decode" else logits.clone()

    def _make_memory(self, most: int) -> dict[tuple[Kind, int], Tensor]:
        """Where the results of splitting operations lie for graphs to read, in all buckets."""
        device = self._backend.device.torch
        kinds = {pair for each in self._markers for pair in zip(each.results, each.places, strict=True)}
        return {(kind, place): torch.zeros(kind.at(most), dtype=kind.dtype, device=device) for kind, place in kinds}


def _outputs(graph: Graph, call: Call | None) -> dict[str, Tensor]:
    return {} if call is None else graph.outputs


def _name_of(what: Call | Marker) -> str:
    return what.operation if isinstance(what, Marker) else what.operation.name
