"""The capture of a step in pieces: at a splitting operation one capture ends, the operation runs, the next begins."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import attrs
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode_temporarily
from torch.utils._pytree import tree_iter

from hal import ops
from hal.device.captures import Captures
from hal.device.graph import Graph
from hal.drivers.backend import Backend
from hal.errors import CaptureError
from hal.execution.pieces.split_calls import Cut, SplitCall, tensors_of
from hal.ops.declaration.operation import Operation
from hal.ops.kernels.kernel_table import Kernel


@attrs.frozen
class Part:
    """A graph, and the call behind it.

    Attributes:
        graph: up to the call.
        call: of the operation, on what the graph computes; None if the step ends here.
        results: where the results go, and how each is cut to a step.
    """

    graph: Graph
    call: SplitCall | None = None
    results: tuple[tuple[Tensor, Cut], ...] = ()


@attrs.frozen
class Splitter:
    """Captures what a function does between its calls of splitting operations. For one run.

    Args:
        backend: that captures.
        at: names of the splitting operations.
        read: sorts the arguments of a call.
        fields: of the batch, by the tensors' ids, that only splitting operations may read.
        keep: takes the place of a call, the call and its results, and gives memory for these, with how each is cut.
        new_graph: makes the next graph.
    """

    backend: Backend
    at: Collection[str]
    read: Callable[[Operation, Mapping[str, Any]], SplitCall]
    fields: Mapping[int, str]
    keep: Callable[[int, SplitCall, list[Tensor]], tuple[tuple[Tensor, Cut], ...]]
    new_graph: Callable[[], Graph]

    def capture(self, function: Callable[[], Tensor], pool: Any) -> tuple[list[Part], Any]:
        """Run ``function`` once; return the pieces, the last of which gives what it returned, and their pool."""
        run = _Run(self, pool)
        device = self.backend.device
        device.synchronize()  # what runs between captures does so on their stream
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
        self.between = True  # captures, when nothing is watched
        self._captures: Captures
        self._outside = len(_get_current_function_mode_stack())
        self.graph: Graph

    def begin(self, captures: Captures) -> None:
        """Begin the next capture."""
        self._captures, self.graph = captures, self._of.new_graph()
        captures.begin(self.graph, pool=self._pool)
        self.between = False

    def wrap(self, operation: Operation, kernel: Kernel) -> Kernel:
        """The interception of the function's calls."""
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
        """Raise CaptureError if a capture would read what differs from step to step."""
        fields = self._of.fields
        for each in () if self.between else arguments:
            if id(each) in fields:
                raise CaptureError(
                    f"{name} reads batch.{fields[id(each)]}, whose shape changes from step to step, in a capture",
                    f'name {name} in splitting_ops if it is an operation, or use the compiler "piecewise"',
                )

    @contextmanager
    def _apart_from_modes(self) -> Iterator[None]:
        """Without the captures' own function modes, the innermost ones: a kernel's many small calls all see them."""
        with ExitStack() as stack:
            for _ in range(len(_get_current_function_mode_stack()) - self._outside):
                stack.enter_context(_pop_mode_temporarily())
            yield

    def _split(self, operation: Operation, kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        captures = self._captures
        captures.check_modes(f"{operation.name} splits the step")
        call = self._of.read(operation, operation.arguments(args, kwargs))
        self.between = True  # what ends a capture looks at many tensors, and reads no field
        # Tensors of their own, as the function's belong to the function.
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
    """Shows every function's arguments to ``refuse``."""

    def __init__(self, refuse: Callable[[str, Iterable[Any]], None]) -> None:
        super().__init__()
        self._refuse = refuse

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._refuse(getattr(func, "__name__", str(func)), tree_iter((args, kwargs)))
        return func(*args, **(kwargs or {}))
