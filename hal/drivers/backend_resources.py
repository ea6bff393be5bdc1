"""Device resources of a backend: graphs, states, error translation, launch counts, and closing."""

from __future__ import annotations

import gc
import inspect
import reprlib
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import wraps
from types import TracebackType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from hal.device.capture_checks import CAPTURING, check_not_capturing
from hal.device.closing import Closable
from hal.device.device import Device, Stream, out_of_memory_message
from hal.device.graph import Captures, Graph
from hal.errors import ConfigError, DeviceError, DeviceOutOfMemory, DriverIncompatible, HalError
from hal.step.state import StateMemory, StateSpec, canonical_states


def _memory(memory: Any, spec: StateSpec) -> str:
    if not isinstance(memory, StateMemory):
        return "a hal.step.StateMemory"
    same = [*map(set, memory.layers)] == [*map(set, spec.layers)]
    if same and all(isinstance(each, Tensor) for _, each in memory.tensors()):
        return ""
    return "a hal.step.StateMemory with a tensor for each state of each layer of the spec"


def _same_shape(result: Any, weight: Tensor, *use: Any) -> str:
    if isinstance(result, Tensor) and result.shape == weight.shape:
        return ""
    return f"a tensor of the shape {list(weight.shape)}, which it was given"


def _prepared(result: Any, weights: Mapping[str, Tensor], *use: Any) -> str:
    if isinstance(result, Mapping) and all(isinstance(result.get(each), Tensor) for each in weights):
        return ""
    return f"a mapping with a tensor for each of {', '.join(weights)}, which it was given"


def _instance(kind: type[Any], what: str) -> Callable[..., str]:
    return lambda result, *given: "" if isinstance(result, kind) else what


_RESULTS: Mapping[str, Callable[..., str]] = {
    "graph": _instance(Graph, "a hal.vendor.Graph"),
    "allocate": _memory,
    "prepare_weights": _prepared,
    "describe_kernel": _instance(str, "a string"),
    "plain_weight": _same_shape,
    "explain": lambda result, error: "" if result is None or isinstance(result, HalError) else "a HalError, or None",
    "counting_launches": _instance(AbstractContextManager, "a context manager"),
    "capturing": _instance(AbstractContextManager, "a context manager"),
    "resolve": lambda result, operation: "" if callable(result) else "a callable",
}
"""For each method, a function of its result and arguments: the required result in words, or an empty string."""
HOOKS = frozenset(_RESULTS)
"""The methods whose results are checked. Others return nothing, or are called in every step."""


def checked(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a driver's override of the method ``name`` that raises DriverIncompatible for a wrong result."""
    wrong = _RESULTS[name]

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        bind = getattr(method, "__get__", None)
        bound = method if bind is None else bind(self, type(self))  # a staticmethod takes no self
        result = bound(*args, **kwargs)
        if kwargs:
            given = inspect.signature(bound).bind(*args, **kwargs)
            args, kwargs = given.args, given.kwargs
        if wanted := wrong(result, *args, *kwargs.values()):
            raise DriverIncompatible(
                f"{name} of the driver {self.name} returned {_described(result)}",
                f"report it to the driver's vendor, who must make {type(self).__name__}.{name} return {wanted}",
            )
        return result

    return call


def _described(result: Any) -> str:
    return f"a tensor of the shape {list(result.shape)}" if isinstance(result, Tensor) else reprlib.repr(result)


class BackendResources(Closable):
    """The device resources of a :class:`hal.Backend`: it creates graphs and states, and frees them when it is closed.

    Attributes:
        name: the driver's name.
        device: the device that the backend runs on.
        captured_graphs: the graphs that its runners hold.
        runners: the runners on this backend, which are closed with it.
    """

    def __init__(self, name: str, device: Device) -> None:
        super().__init__(f"the backend {name}", "open it again with hal.open")
        self.name = name
        self.device = device
        self.captured_graphs: WeakSet[Graph] = WeakSet()
        self.runners: WeakSet[Closable] = WeakSet()
        self._made: WeakSet[Graph] = WeakSet()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in HOOKS & vars(cls).keys():
            setattr(cls, name, checked(name, vars(cls)[name]))
        for name, guard in _GUARDS.items():  # so that drivers need not handle closing
            if name in vars(cls):
                setattr(cls, name, guard(vars(cls)[name]))

    def graph(self) -> Graph:
        """Return a new, empty graph, which is closed with the backend.

        Raises:
            ConfigError: the driver does not support graphs.
            ClosedError: the backend is closed.
        """
        raise ConfigError(f"the backend {self.name} has no graphs", 'set compilation.compiler to "eager"')

    def capturing(self, stream: Stream | None = None) -> AbstractContextManager[Captures]:
        """Return a context manager that captures several graphs in turn; see :meth:`hal.vendor.Graph.capturing`."""
        return self.graph().capturing(stream)

    def allocate(self, spec: StateSpec) -> StateMemory:
        """Allocate a model's states, zeroed, in the backend's layout; the default is the canonical layout."""
        with self.uses:
            return canonical_states(spec, self.device.torch)

    def explain(self, error: BaseException) -> HalError | None:
        """Return the HalError for an exception of PyTorch or the vendor's package, or None if it is unknown.

        Runners raise the result, so that callers handle :class:`~hal.errors.DeviceError` on every device. The default
        handles torch's device exceptions.
        """
        if what := out_of_memory_message(error):
            return DeviceOutOfMemory(what, DeviceOutOfMemory.REMEDY)
        if isinstance(error, torch.AcceleratorError):
            return DeviceError(f"the device failed: {error}", "rerun the step; restart the process if it fails again")
        return None

    def explained(self, error: Exception) -> HalError | None:
        """Return the result of :meth:`explain` for an exception that is none of hal's, else None."""
        return None if isinstance(error, HalError) else self.explain(error)

    def translating_errors(self) -> AbstractContextManager[None]:
        """Raise the result of :meth:`explain` in place of exceptions that it knows.

        Read a step's results inside the block: device failures are raised where the host waits.
        """
        return _Translating(self)

    def counting_launches(self) -> AbstractContextManager[Counter[str]]:
        """Return a context manager whose counter holds, after the block, the number of launches of each kernel.

        Raises:
            ConfigError: the backend cannot count launches. Its key is ``launches``.
        """
        raise ConfigError(
            f"the backend {self.name} does not count launches",
            "use a backend that does, such as an emulated device",
            key="launches",
        )

    def _release(self) -> None:
        """Free the driver's streams, workspaces and handles. :meth:`close` calls it once.

        By then the runners and graphs of this backend are closed, and none of their work is running. Keep process-wide
        resources that other backends of the driver need.
        """

    def _check_closable(self) -> None:
        super()._check_closable()
        check_not_capturing()
        for runner in list(self.runners):
            runner.uses.check_not_in_use_by_this_thread()

    def _free(self) -> None:
        with ExitStack() as stack:  # runs every callback, even if one raises
            stack.callback(self._empty_cache)
            stack.callback(self._release)
            stack.callback(self._close_graphs)
            stack.callback(self._refuse_operations)
            for runner in list(self.runners):
                stack.callback(runner.close)

    @abstractmethod
    def _refuse_operations(self) -> None:
        """Make operations that would run on this backend raise ClosedError."""

    def _close_graphs(self) -> None:
        graphs = list(self._made)
        if not graphs:
            return
        with CAPTURING, ExitStack() as stack:
            stack.callback(gc.collect)  # captured objects may form reference cycles
            stack.callback(self.captured_graphs.clear)
            for graph in graphs:
                stack.callback(graph.close)
            with self.translating_errors():
                self.device.synchronize()

    def _empty_cache(self) -> None:
        with CAPTURING:  # emptying the cache may disturb another thread's capture
            self.device.empty_cache()


class _Translating:
    """The context manager of :meth:`BackendResources.translating_errors`. A generator would take longer."""

    __slots__ = ("_backend",)

    def __init__(self, backend: BackendResources) -> None:
        self._backend = backend

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and (known := self._backend.explained(error)) is not None:
            raise known from error


def _while_open(method: Callable[..., Any]) -> Callable[..., Any]:
    """Count each call among the backend's uses, so that calls on a closed backend raise ClosedError."""

    @wraps(method)
    def guarded(self: BackendResources, *args: Any, **kwargs: Any) -> Any:
        with self.uses:
            return method(self, *args, **kwargs)

    return guarded


def _making_graphs(method: Callable[..., Any]) -> Callable[..., Any]:
    """Count each call like :func:`_while_open`, and register the returned graph to be closed with the backend."""

    @wraps(method)
    def guarded(self: BackendResources) -> Any:
        with self.uses:
            graph = method(self)
            self._made.add(graph)
            return graph

    return guarded


_GUARDS = {"graph": _making_graphs, "allocate": _while_open}
"""Wrappers of the methods that drivers override, by method name."""
