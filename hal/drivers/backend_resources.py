"""The part of a backend that uses the device: graphs, states, errors, counts of launches, and closing."""

from __future__ import annotations

import gc
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Any
from weakref import WeakSet

import torch

from hal.device.capture_lock import CAPTURING, check_not_capturing
from hal.device.captures import Captures
from hal.device.closing import Closable
from hal.device.device import Device
from hal.device.graph import Graph
from hal.device.memory import lacking_memory
from hal.device.stream import Stream
from hal.errors import ConfigError, DeviceError, DeviceOutOfMemory, HalError
from hal.step.state import StateMemory, StateSpec, canonical_states


class BackendResources(Closable):
    """The part of :class:`hal.Backend` that uses the device. It makes graphs and states, and frees them in the end.

    Attributes:
        name: the driver's name.
        device: the device it runs on.
        captured_graphs: the graphs that its runners hold.
        runners: that run on it, which are closed with it.
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
        for name, guard in _GUARDS.items():  # so that no driver has to think of closing here
            if name in vars(cls):
                setattr(cls, name, guard(vars(cls)[name]))

    def graph(self) -> Graph:
        """A new, empty graph. The backend closes it when it is closed itself.

        Raises:
            ConfigError: the driver brings no graphs.
            ClosedError: the backend is closed.
        """
        raise ConfigError(f"the backend {self.name} has no graphs", 'use the compiler "eager"')

    def capturing(self, stream: Stream | None = None) -> AbstractContextManager[Captures]:
        """A block in which several graphs of this backend are captured, one after the other; see `Graph.capturing`."""
        return self.graph().capturing(stream)

    def allocate(self, spec: StateSpec) -> StateMemory:
        """Allocate a model's states, zeroed, in a layout of the backend's choosing; by default the canonical one."""
        with self.uses:
            return canonical_states(spec, self.device.torch)

    def explain(self, error: BaseException) -> HalError | None:
        """The typed error for an exception that PyTorch or the vendor's package raised, or None if it is not known.

        Runners ask here, so that callers meet :class:`~hal.errors.DeviceError`, whatever the vendor raises. By default
        it knows torch's own exceptions for devices.
        """
        if what := lacking_memory(error):
            return DeviceOutOfMemory(what, DeviceOutOfMemory.REMEDY)
        if isinstance(error, torch.AcceleratorError):
            return DeviceError(f"the device failed: {error}", "run the step again; restart the process if it repeats")
        return None

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Inside the block, exceptions that :meth:`explain` knows are raised as what it says.

        Put reads of a step's results into it: what fails on the device is reported where the host waits.
        """
        try:
            yield
        except HalError:
            raise
        except Exception as error:
            known = self.explain(error)
            if known is None:
                raise
            raise known from error

    def counting_launches(self) -> AbstractContextManager[Counter[str]]:
        """A context whose counter has, behind the block, how often each kernel was launched on the device in it.

        Raises:
            ConfigError: the backend cannot tell.
        """
        raise ConfigError(
            f"the backend {self.name} does not count launches", "use one that does, such as an emulated device"
        )

    def _release(self) -> None:
        """Give back what the driver itself holds: streams, workspaces, handles. :meth:`close` calls it once.

        By then the runners and graphs of this backend are closed, and nothing of theirs runs on the device any more.
        What a process needs for other backends of the same driver stays.
        """

    def _check_closable(self) -> None:
        super()._check_closable()
        check_not_capturing()
        for runner in list(self.runners):
            runner.uses.check_not_mine()

    def _free(self) -> None:
        with ExitStack() as stack:  # goes on to the end, whatever raises
            stack.callback(self._empty_cache)
            stack.callback(self._release)
            stack.callback(self._close_graphs)
            stack.callback(self._refuse_operations)
            for runner in list(self.runners):
                stack.callback(runner.close)

    @abstractmethod
    def _refuse_operations(self) -> None:
        """Have operations that would run on this backend raise ClosedError."""

    def _close_graphs(self) -> None:
        graphs = list(self._made)
        if not graphs:
            return
        with CAPTURING, ExitStack() as stack:
            stack.callback(gc.collect)  # what was captured may refer to itself
            stack.callback(self.captured_graphs.clear)
            for graph in graphs:
                stack.callback(graph.close)
            with self.explaining():
                self.device.synchronize()

    def _empty_cache(self) -> None:
        with CAPTURING:  # a capture of another thread's may be disturbed by it
            self.device.empty_cache()


def _while_open(method: Callable[..., Any]) -> Callable[..., Any]:
    """Count a call among the backend's uses, so that it is refused when the backend is closed."""

    @wraps(method)
    def guarded(self: BackendResources, *args: Any, **kwargs: Any) -> Any:
        with self.uses:
            return method(self, *args, **kwargs)

    return guarded


def _making_graphs(method: Callable[..., Any]) -> Callable[..., Any]:
    """Likewise, and have the backend close the graph that the call makes."""

    @wraps(method)
    def guarded(self: BackendResources) -> Any:
        with self.uses:
            graph = method(self)
            self._made.add(graph)
            return graph

    return guarded


_GUARDS = {"graph": _making_graphs, "allocate": _while_open}
"""By the name of a method that drivers override, what is put around theirs."""
