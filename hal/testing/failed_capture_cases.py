"""Captures that fail: what comes out, and that the graph and the device are as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hal.device.graph import Graph
from hal.drivers.backend import Backend
from hal.errors import BatchError, CaptureError, DeviceError, GraphError
from hal.testing.case import raises, require

SECONDS = 60
"""That another thread gets for a capture, before what holds it up counts as held for good."""
SHAPE = (32, 64)


class _Nothing(TorchDispatchMode):
    """Changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _modes(backend: Backend) -> None:
    """A mode that the code enters in a capture is left in it; one that is not is named."""
    x, graph, mode = filled(backend), backend.graph(), _Nothing()  # type: ignore[no-untyped-call]

    def inside() -> Tensor:
        with mode:
            y = x * 2
        return y + 1

    output = graph.capture(inside)
    x.fill_(3.0)
    graph.replay()
    holds(output, 7.0, "a capture of a function that enters a mode of torch")
    graph.reset()
    try:
        with backend.capturing() as captures:
            captures.begin(graph)
            y = x + 1
            with mode:
                captures.end(y)
    except CaptureError as error:
        require("_Nothing" in error.problem, f"the CaptureError does not name the mode: {error.problem}")
    else:
        raise AssertionError("a capture ended in a mode of torch that was entered in it")
    del y
    works_again(backend, graph, x)


def _order_of_use(backend: Backend) -> None:
    x, graph = filled(backend), backend.graph()
    raises(GraphError, graph.replay, "replay() before capture()")
    graph.capture(lambda: x * 2)
    raises(GraphError, lambda: graph.capture(lambda: x * 3), "a second capture() without reset()")


class Planted(RuntimeError):
    """Raised on purpose."""


RAISED: dict[str, Callable[[], BaseException]] = {
    "exception": lambda: KeyError("planted"),
    "runtime-error": lambda: RuntimeError("planted"),
    "own": lambda: Planted("planted"),
    "hal-error": lambda: BatchError("planted", "none"),
    "device-error": lambda: DeviceError("planted", "none"),
    "interrupt": lambda: KeyboardInterrupt("planted"),
    "exit": lambda: SystemExit(3),
}
"""By the name that cases have: what functions raise, and what has nothing to do with being captured."""


def _error_inside(make: Callable[[], BaseException], backend: Backend) -> None:
    """What the function raises comes out as it is, and leaves the graph and the device as if nothing had happened."""
    x, graph = filled(backend), backend.graph()
    found: BaseException | None = None
    error, cause = make(), ValueError("the cause")

    def broken() -> Tensor:
        y = x + 1
        del y
        raise error from cause

    try:
        graph.capture(broken)
    except BaseException as raised:
        found = raised
    require(found is not None, "capture() swallowed what the captured function raised")
    require(found is error, f"the captured function raised {error!r}, but capture() raised {found!r}")
    require(error.__cause__ is cause, f"the cause of the exception became {error.__cause__!r}")
    works_again(backend, graph, x)


def works_again(backend: Backend, graph: Graph, x: Tensor) -> None:
    """After a capture that failed: the graph is empty, and it, eager work and another thread's graph go on."""
    raises(GraphError, graph.replay, "replay() after a capture that failed")
    x.fill_(4.0)
    holds(x * 3, 12.0, "an eager computation after a capture that failed")
    backend.device.empty_cache()
    output = graph.capture(lambda: x * 2)
    graph.replay()
    holds(output, 8.0, "a capture after one that failed")
    with ThreadPoolExecutor(1) as thread:
        captured = thread.submit(_captured_elsewhere, backend).result(timeout=SECONDS)
    holds(captured, 3.0, "a capture in another thread after one that failed")


def _captured_elsewhere(backend: Backend) -> Tensor:
    x, graph = filled(backend), backend.graph()
    output: Tensor = graph.capture(lambda: x + 2)
    graph.replay()
    return output.cpu()


def _lacks_memory(backend: Backend) -> None:
    """A capture for which there is no memory says so, whichever exception that is on the device."""
    x, graph = filled(backend), backend.graph()
    found: BaseException | None = None
    try:
        graph.capture(lambda: x + torch.empty(1 << 60, dtype=torch.uint8, device=x.device)[0])
    except CaptureError as error:
        found = error
    require(found is not None, "an exabyte was allocated in a capture")
    require(found is not None and found.__cause__ is not None, "the CaptureError does not have its cause chained")
    del found
    works_again(backend, graph, x)


def _value_read(backend: Backend) -> None:
    """A value that is read on the host is refused, or else followed; it is not frozen into the graph."""
    x, graph = filled(backend), backend.graph()
    try:
        output = graph.capture(lambda: x * float(x[0, 0].item()))
    except CaptureError as error:
        require(bool(error.problem and error.remedy), "the CaptureError says nothing")
    else:
        x.fill_(3.0)
        graph.replay()
        holds(output, 9.0, "a replay of a function that reads a value on the host")
    graph.reset()
    output = graph.capture(lambda: x + 1)
    graph.replay()
    holds(output, float(x.cpu()[0, 0]) + 1, "a capture after one that was refused")


CHECKS: dict[str, Callable[[Backend], None]] = {
    "modes": _modes,
    "order-of-use": _order_of_use,
    "memory-inside": _lacks_memory,
    "value-read": _value_read,
    **{f"error-inside/{name}": partial(_error_inside, make) for name, make in RAISED.items()},
}


def filled(backend: Backend, value: float = 1.0) -> Tensor:
    """Return a tensor of SHAPE on the backend's device, filled with ``value``."""
    return torch.full(SHAPE, value, dtype=backend.limits.dtypes[0], device=backend.device.torch)


def holds(tensor: Tensor, value: float, what: str) -> None:
    """Raise AssertionError unless every element is ``value``."""
    found = sorted(set(tensor.cpu().float().flatten().tolist()))
    require(found == [value], f"{what}: {found[:4]} in place of {value}")
