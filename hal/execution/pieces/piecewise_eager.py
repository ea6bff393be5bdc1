"""The ``piecewise_eager`` form: the model's Python code runs once per bucket and is captured in pieces.

At each call of a splitting operation, the current capture ends, the operation runs, and the next capture begins. The
model receives the operation's results in fixed memory, where replays put them too. A replay alternates between graphs
and splitting operations, which take the batch's lengths and block tables. The declaration of an operation says which of
its tensors have a row per token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from math import prod
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode_temporarily
from torch.utils._pytree import tree_iter

from hal import ops
from hal.device.graph import Captures, Graph
from hal.drivers.backend import Backend
from hal.drivers.compiler import Outputs, Plan
from hal.errors import CaptureError, ConfigError
from hal.execution.capture.captured_form import Bucket, TokenForm
from hal.execution.pieces.split_calls import Cut, Kind, SplitCall, cut_to, record_calls, tensors_of
from hal.execution.step_output import check_hidden
from hal.ops.declaration.axes import TOKENS
from hal.ops.declaration.operation import Operation
from hal.ops.kernels.kernel_table import Kernel
from hal.step import Batch, StaticBatch, StepShape, fields_of


@attrs.frozen
class Part:
    """A graph and the splitting operation after it.

    Attributes:
        graph: the graph up to the call.
        call: the call, on tensors that the graph computes; None after the last graph.
        results: the memory of the results, and how each is cut to a step.
    """

    graph: Graph
    call: SplitCall | None = None
    results: tuple[tuple[Tensor, Cut], ...] = ()


@attrs.frozen
class Splitter:
    """Captures the code of a function between its calls of splitting operations, in one run.

    Args:
        backend: captures the graphs.
        at: names of the splitting operations.
        read: classifies the arguments of a call.
        fields: batch fields, by the ids of their tensors, that only splitting operations may read.
        keep: given a call's index, the call and its results, returns the memory for these and their cuts.
        new_graph: creates the next graph.
    """

    backend: Backend
    at: Collection[str]
    read: Callable[[Operation, Mapping[str, Any]], SplitCall]
    fields: Mapping[int, str]
    keep: Callable[[int, SplitCall, list[Tensor]], tuple[tuple[Tensor, Cut], ...]]
    new_graph: Callable[[], Graph]

    def capture(self, function: Callable[[], Outputs], pool: Any) -> tuple[list[Part], Any]:
        """Run ``function`` once, and return the parts, the last of which outputs its result, and the pool."""
        run = _Run(self, pool)
        device = self.backend.device
        device.synchronize()  # Code between captures runs on their stream.
        with _Guard(run.refuse), self.backend.capturing() as captures, ops.intercepted(run.wrap):
            run.begin(captures)
            outputs = function()
            run.between = True
            captures.end(outputs)
            run.parts.append(Part(run.graph))
        device.synchronize()
        return run.parts, run.graph.pool


class _Run:
    def __init__(self, splitter: Splitter, pool: Any) -> None:
        self._of, self._pool = splitter, pool
        self.parts: list[Part] = []
        self.between = True  # Between captures, calls are not checked.
        self._captures: Captures
        self._outside = len(_get_current_function_mode_stack())
        self.graph: Graph

    def begin(self, captures: Captures) -> None:
        """Begin the next capture."""
        self._captures, self.graph = captures, self._of.new_graph()
        captures.begin(self.graph, pool=self._pool)
        self.between = False

    def wrap(self, operation: Operation, kernel: Kernel) -> Kernel:
        """Intercept the function's calls of operations."""
        splits = operation.name in self._of.at

        def watched(*args: Any, **kwargs: Any) -> Any:
            if self.between:
                return kernel(*args, **kwargs)
            if splits:
                return self._split(operation, kernel, args, kwargs)
            self.refuse(operation.name, (*args, *kwargs.values()))
            return kernel(*args, **kwargs)

        return watched

    def refuse(self, name: str, arguments: Iterable[Any]) -> None:
        """Raise CaptureError if a capture would read a field that differs between steps."""
        fields = self._of.fields
        for each in () if self.between else arguments:
            if id(each) in fields:
                raise CaptureError(
                    f"{name} reads batch.{fields[id(each)]} in a capture, and its shape changes between steps",
                    f'add {name} to splitting_ops if it is an operation, or use the compiler "piecewise"',
                )

    @contextmanager
    def _apart_from_modes(self) -> Iterator[None]:
        """Leave the captures' function modes, the innermost ones, which slow a kernel's many small calls."""
        with ExitStack() as stack:
            for _ in range(len(_get_current_function_mode_stack()) - self._outside):
                stack.enter_context(_pop_mode_temporarily())
            yield

    def _split(self, operation: Operation, kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        captures = self._captures
        captures.check_modes(f"{operation.name} splits the step")
        call = self._of.read(operation, operation.arguments(args, kwargs))
        self.between = True  # Ending a capture inspects many tensors, but reads no field.
        # Detach: the function owns its tensors.
        rows = captures.end({name: each.detach() for name, each in call.computed.items()})
        with self._apart_from_modes():
            found = kernel(*args, **kwargs)
        results = tensors_of(found)
        places = self._of.keep(len(self.parts), call, results)
        for (memory, _), result in zip(places, results, strict=True):
            memory.copy_(result)
        self.parts.append(Part(self.graph, attrs.evolve(call, computed=rows), places))
        self._pool = self.graph.pool
        several, some = isinstance(found, tuple), bool(results)
        del found, results
        self.begin(captures)
        given = tuple(memory for memory, _ in places)
        return given if several else given[0] if some else None


class _Guard(TorchFunctionMode):
    """Passes the arguments of every torch function to ``refuse``."""

    def __init__(self, refuse: Callable[[str, Iterable[Any]], None]) -> None:
        super().__init__()
        self._refuse = refuse

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._refuse(getattr(func, "__name__", str(func)), tree_iter((args, kwargs)))
        return func(*args, **(kwargs or {}))


Read = Callable[[Operation, Mapping[str, Any]], SplitCall]


class PiecewiseEagerForm(TokenForm):
    """The model's Python code, captured between the splitting operations that it calls. See :class:`TokenForm`.

    Attributes:
        at: the splitting operations.
    """

    at: set[str]

    def prepare(self) -> Sequence[StaticBatch]:
        (largest,) = super().prepare()
        context, most = self.context, largest.shape.tokens
        self._largest = largest
        self._of_steps = [
            name
            for name, each in fields_of(context.model.batch_type).items()
            if each.twin_of is not None or not each.only_tokens
        ]
        self.at = context.backend.splitting_ops(context.config)
        states = (tensor for _, tensor in context.states.tensors())
        self._kept = {id(each) for each in (*context.model.parameters(), *context.model.buffers(), *states)}
        batch = self._batch(most)
        with torch.inference_mode():
            self._calls = record_calls(partial(context.eagerly, batch), self.at, self._reader(batch))
            self.at = context.backend.splitting_ops(context.config, {each.operation for each in self._calls})
            self._check_called()
            self._memory = self._make_memory()
        self.num_graphs = len(self._calls) + 1
        return [largest]

    def describe(self) -> str:
        return f"{self.num_graphs} pieces of the model's own Python"

    def warm_up(self, largest: StaticBatch) -> Callable[[], Any]:
        return partial(self.context.eagerly, self._batch(largest.shape.tokens))

    def _batch(self, size: int) -> Batch:
        """Return a batch on the first rows of the fixed one, with separate lengths."""
        decodes, spec = self.context.phase == "decode", self.context.states.spec
        sequences = size if decodes else 1
        length = min(size // sequences, spec.num_tokens)
        made = self.context.static_batch(
            StepShape(size, sequences, length), max_blocks=1 if decodes else spec.blocks_for(size), length=length
        )
        fixed = self._largest.first(StepShape(size, 0, 0)).by_token
        batch: Batch = attrs.evolve(made.batch, **fixed)
        return batch

    def _fields(self, batch: Batch) -> dict[int, str]:
        """Return the fields that differ between steps, by the ids of their tensors."""
        return {id(getattr(batch, name)): name for name in self._of_steps}

    def _reader(self, batch: Batch) -> Read:
        return partial(SplitCall.read, fields=self._fields(batch), kept=self._kept, sizes=_sizes(batch))

    def capture_bucket(self, bucket: Bucket, pool: Any) -> Any:
        context = self.context
        batch = self._batch(bucket.shape.tokens)

        def new_graph() -> Graph:
            bucket.graphs.append(context.backend.graph())
            return bucket.graphs[-1]

        splitter = Splitter(
            context.backend, self.at, self._reader(batch), self._fields(batch), partial(self._keep, batch), new_graph
        )
        bucket.parts, pool = splitter.capture(partial(context.eagerly, batch), pool)
        if len(bucket.parts) <= len(self._calls):
            raise self._different_call(batch, None, len(bucket.parts) - 1)
        check_hidden(context.model, bucket.graphs[-1].outputs, batch.num_tokens)
        return pool

    def _keep(self, batch: Batch, index: int, call: SplitCall, results: list[Tensor]) -> tuple[tuple[Tensor, Cut], ...]:
        """Return the fixed memory for the results of a call, which all buckets share."""
        expected = self._calls[index] if index < len(self._calls) else None
        kinds = call.result_kinds(results)
        if expected is None or (call.operation.name, call.kinds, kinds) != (
            expected.operation,
            expected.kinds,
            [kind for kind, _ in expected.results],
        ):
            raise self._different_call(batch, call, index)
        memory = [self._memory[pair] for pair in zip(kinds, expected.places, strict=True)]
        if any(each.numel() < result.numel() for each, result in zip(memory, results, strict=True)):
            raise self._different_call(batch, call, index)
        given = [each[: prod(result.shape)].view(result.shape) for each, result in zip(memory, results, strict=True)]
        return tuple(zip(given, call.result_cuts(results, _sizes(batch)), strict=True))

    def _different_call(self, batch: Batch, call: SplitCall | None, index: int) -> CaptureError:
        found = "nothing" if call is None else call.operation.name
        expected = self._calls[index].operation if index < len(self._calls) else "nothing"
        return CaptureError(
            f"for {batch.num_tokens} tokens, {type(self.context.model).__name__} calls {found} where it calls "
            f"{expected} for {self._largest.shape.tokens}, or it passes tensors of another kind",
            'make it call the same operations for all sizes, or use the compiler "eager"',
        )

    def plan_bucket(self, bucket: Bucket, batch: Batch) -> Plan:
        return partial(self._run, bucket, batch)

    def _run(self, bucket: Bucket, batch: Batch) -> Outputs:
        bucket.static.fill_tokens(batch)
        sizes = {TOKENS: batch.num_tokens}
        part: Part
        for part in bucket.parts:
            part.graph.replay()
            if (call := part.call) is None:
                break
            given = {name: getattr(batch, field) for name, field in call.fields.items()}
            given |= {name: cut_to(each, call.cuts[name], sizes) for name, each in call.computed.items()}
            results = tensors_of(call.operation.function(**call.fixed, **given))
            for (memory, cut), result in zip(part.results, results, strict=True):
                cut_to(memory, cut, sizes).copy_(result)
        outputs: Outputs = part.graph.outputs
        return outputs

    def _check_called(self) -> None:
        called = {each.operation for each in self._calls}
        if missing := sorted(set(self.at) - called):
            others = f"; of those it calls {', '.join(sorted(called))}" if called else ""
            raise ConfigError(
                f"splitting_ops has {', '.join(missing)}, which the model does not call{others}", "remove the name"
            )

    def _make_memory(self) -> dict[tuple[Kind, int], Tensor]:
        """Return the memory for the results of splitting operations, which all buckets share."""
        most: dict[tuple[Kind, int], int] = {}
        for call in self._calls:
            for (kind, elements), place in zip(call.results, call.places, strict=True):
                most[kind, place] = max(elements, most.get((kind, place), 0))
        device = self.context.backend.device.torch
        return {key: torch.zeros(elements, dtype=key[0].dtype, device=device) for key, elements in most.items()}


def _sizes(batch: Batch) -> dict[str, int]:
    return {TOKENS: batch.num_tokens}
