"""The capture of a step in pieces. At each splitting operation a capture ends, the operation runs, the next begins."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import attrs
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode_temporarily
from torch.utils._pytree import tree_iter

from hal import ops
from hal.device.graph import Captures, Graph
from hal.drivers.backend import Backend
from hal.drivers.compiler import Outputs
from hal.errors import CaptureError
from hal.execution.pieces.split_calls import Cut, SplitCall, tensors_of
from hal.ops.declaration.operation import Operation
from hal.ops.kernels.kernel_table import Kernel


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
