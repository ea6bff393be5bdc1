"""Steps in pieces without a compiler: the model's own Python runs once for each bucket, and is stopped on its way.

Each call of a splitting operation is a marker. There the capture that is under way ends, and the model stays where it
is, in a greenlet; the next capture begins, and the model goes on in it, with fixed memory for the operation's results.
A replay launches a graph, calls the operation with the batch's own lengths and block tables, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

import attrs
import torch
from greenlet import GreenletExit, getcurrent, greenlet  # type: ignore[import-untyped]
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter

from hal import ops
from hal.batch import Batch
from hal.errors import CaptureError, CompileError, ConfigError
from hal.graph import Graph
from hal.ops.declaration import Kernel, Operation
from hal.runtime.tokens import BY_TOKEN, FIELDS, TokenBucket, TokenStep

MOST_ROWS = 64
"""Rows of logits that a prefill gives at once; a step that wants more is run again for the others."""
OF_STEPS = tuple(name for name in FIELDS if name not in (*BY_TOKEN, "logits_indices"))
"""Fields of a batch that only splitting operations may read: they change their shapes from step to step."""


@attrs.frozen
class _Call:
    """A call of a splitting operation that the model is waiting for."""

    operation: Operation
    arguments: dict[str, Any]


@attrs.frozen
class _Kind:
    """A tensor that a marker reads or gives. Its shape is without the first dimension if that goes by tokens."""

    by_token: bool
    shape: tuple[int, ...]
    dtype: torch.dtype

    def at(self, tokens: int) -> tuple[int, ...]:
        """Its shape for so many tokens."""
        return (tokens, *self.shape) if self.by_token else self.shape


@attrs.frozen
class _Marker:
    """What is known of a call from running the model eagerly.

    Attributes:
        operation: its name.
        arguments: the tensors that the model computed for it, by name.
        results: of it, in order.
        several: whether it gives a tuple.
        places: where the results lie: those that are not needed at once may have the same number.
    """

    operation: str
    arguments: dict[str, _Kind]
    results: tuple[_Kind, ...]
    several: bool
    places: tuple[int, ...]


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
            self._markers = self._find_markers(most)
            self._memory = self._make_memory(most)
        self.num_pieces = len(self._markers) + 1

    def _walk(self) -> None:
        self._model(self._batch(self._fixed.num_tokens), self._cache.layers)

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
        model = _Stopping(partial(self._model, batch, self._cache.layers), self._at, fields)
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
            bucket.parts.append(self._part(graph, None, model.call, fields, bucket.size))
        finally:
            model.stop()
        return graph.pool

    def _part(
        self, graph: Graph, marker: _Marker | None, call: _Call | None, fields: Mapping[int, str], size: int
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
            results = _tensors(part.function(**part.fixed, **given))
            for (memory, by_token), result in zip(part.results, results, strict=True):
                (memory[:tokens] if by_token else memory).copy_(result)
        logits: Tensor = part.graph.outputs[:count]
        return logits if self._phase == "decode" else logits.clone()

    def _find_markers(self, most: int) -> list[_Marker]:
        """Run the model eagerly for two sizes, to see which tensors go by tokens."""
        small = max(1, most - 1)
        first, second = self._noted(most), self._noted(small)
        if not first:
            raise ConfigError(
                f"the model calls none of the splitting_ops {', '.join(sorted(self._at))}", "name some that it calls"
            )
        if [each.operation for each in first] != [each.operation for each in second]:
            raise CompileError(
                f"{type(self._model).__name__} calls other operations for {most} tokens than for {small}",
                'let it call the same ones for all sizes, or use the compiler "eager"',
            )
        return [
            attrs.evolve(
                one,
                arguments={
                    name: self._by_both(one.operation, kind, other.arguments[name], most, small)
                    for name, kind in one.arguments.items()
                },
                results=tuple(
                    self._by_both(one.operation, *kinds, most, small)
                    for kinds in zip(one.results, other.results, strict=True)
                ),
            )
            for one, other in zip(first, second, strict=True)
        ]

    def _by_both(self, name: str, one: _Kind, other: _Kind, most: int, small: int) -> _Kind:
        """What a tensor is, by its shapes for two numbers of tokens."""
        if one.shape == other.shape:
            return one
        if (one.shape[0], other.shape[0]) == (most, small) and one.shape[1:] == other.shape[1:]:
            return _Kind(True, one.shape[1:], one.dtype)
        raise CompileError(
            f"{name} has a tensor of {list(one.shape)} for {most} tokens, and of {list(other.shape)} for {small}",
            'let the first dimension go by tokens, or use the compiler "piecewise"',
        )

    def _noted(self, size: int) -> list[_Marker]:
        """The splitting operations that an eager step calls."""
        batch = self._batch(size)
        known = self._weights | {id(getattr(batch, name)) for name in OF_STEPS}
        markers: list[_Marker] = []
        alive: list[StorageWeakRef] = []

        def wrap(operation: Operation, kernel: Kernel) -> Kernel:
            if operation.name not in self._at:
                return kernel

            def noted(*args: Any, **kwargs: Any) -> Any:
                arguments = operation.arguments(args, kwargs)
                computed = {
                    name: _kind(each) for name, each in arguments.items()
                    if isinstance(each, Tensor) and id(each) not in known
                }  # fmt: skip
                found = kernel(*args, **kwargs)
                results = _tensors(found)
                places: list[int] = []
                for result in results:
                    # What is gone by now was read by pieces before this one.
                    free = (place for place, each in enumerate(alive) if each.expired() and place not in places)
                    place = next(free, len(alive))
                    alive[place : place + 1] = [StorageWeakRef(result.untyped_storage())]
                    places.append(place)
                several = isinstance(found, tuple)
                markers.append(_Marker(operation.name, computed, tuple(map(_kind, results)), several, tuple(places)))
                return found

            return noted

        with ops.intercepted(wrap):
            self._model(batch, self._cache.layers)
        return markers

    def _make_memory(self, most: int) -> dict[tuple[_Kind, int], Tensor]:
        """Where the results of splitting operations lie for graphs to read, in all buckets."""
        device = self._backend.device.torch
        kinds = {pair for each in self._markers for pair in zip(each.results, each.places, strict=True)}
        return {(kind, place): torch.zeros(kind.at(most), dtype=kind.dtype, device=device) for kind, place in kinds}


def _outputs(graph: Graph, call: _Call | None) -> dict[str, Tensor]:
    return {} if call is None else graph.outputs


def _kind(tensor: Tensor) -> _Kind:
    return _Kind(False, tuple(tensor.shape), tensor.dtype)


def _name_of(what: _Call | _Marker) -> str:
    return what.operation if isinstance(what, _Marker) else what.operation.name


def _tensors(found: Any) -> list[Tensor]:
    return [each for each in tree_iter(found) if isinstance(each, Tensor)]


class _Stopping:
    """Runs a function up to each call of a splitting operation, in the capture that is under way.

    Args:
        function: gives logits.
        at: names of the splitting operations.
        fields: of the batch, by the tensors' ids, that nothing else may read.
    """

    def __init__(self, function: Callable[[], Tensor], at: Collection[str], fields: Mapping[int, str]) -> None:
        self._greenlet = greenlet(lambda _: function())
        self._parent = getcurrent()
        self._at, self._fields = at, fields
        self.call: _Call | None = None

    def resume(self, given: Any, names: Collection[str]) -> Any:
        """Go on, with what the call that was waited for gives.

        Returns:
            The tensors that the next call takes as ``names``, or logits.
        """
        self.call = None
        with ops.intercepted(self._wrap), _Guard(self._refuse):
            found = self._greenlet.switch(given)
        if not isinstance(found, _Call):
            return found
        self.call = found
        # Tensors of their own, as the model's belong to the model.
        return {name: each.detach() for name, each in found.arguments.items() if name in names}

    def stop(self) -> None:
        """Leave the function where it is, for good."""
        self.call = None
        if not self._greenlet.dead:
            self._greenlet.throw(GreenletExit)

    def _wrap(self, operation: Operation, kernel: Kernel) -> Kernel:
        if operation.name in self._at:
            return lambda *args, **kwargs: self._parent.switch(_Call(operation, operation.arguments(args, kwargs)))

        def checked(*args: Any, **kwargs: Any) -> Any:
            self._refuse(operation.name, (*args, *kwargs.values()))
            return kernel(*args, **kwargs)

        return checked

    def _refuse(self, name: str, arguments: Iterable[Any]) -> None:
        for each in arguments:
            if id(each) in self._fields:
                raise CaptureError(
                    f"{name} reads batch.{self._fields[id(each)]}, whose shape changes from step to step, in a capture",
                    f'name {name} in splitting_ops if it is an operation, or use the compiler "piecewise"',
                )


class _Guard(TorchFunctionMode):
    """Shows every function's arguments to ``refuse``."""

    def __init__(self, refuse: Callable[[str, Iterable[Any]], None]) -> None:
        super().__init__()
        self._refuse = refuse

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._refuse(getattr(func, "__name__", str(func)), tree_iter((args, kwargs)))
        return func(*args, **(kwargs or {}))
