"""Graphs: capture and replay, host values, pools, and what may go wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hal import ops
from hal.device.graph import Graph
from hal.drivers.backend import Backend
from hal.errors import BatchError, CaptureError, DeviceError, GraphError
from hal.testing.case import Case, require
from hal.testing.graphs import host_value_cases
from hal.testing.graphs.replays import check_replay
from hal.testing.target import Target

SHAPE = (32, 64)
SECONDS = 60
"""That another thread gets for a capture, before what holds it up counts as held for good."""
Check = Callable[[Backend], None]


def cases(target: Target) -> Iterator[Case]:
    """``graphs/<what>``, ``graphs/host-values/<what>`` and ``graphs/replay/<operation>``"""
    checks: list[tuple[str, Check]] = [
        ("inputs-in-place", _inputs_in_place), ("addresses", _addresses), ("structure", _structure),
        ("no-python", _glue), ("pool", _pool), ("several", _several), ("hold", _hold), ("reset", _reset),
        ("pieces", _pieces), ("modes", _modes),
        ("order-of-use", _order_of_use), ("memory-inside", _lacks_memory), ("value-read", _value_read),
        *((f"error-inside/{name}", partial(_error_inside, make)) for name, make in RAISED.items()),
        ("on-a-stream", _on_a_stream), ("back-to-back", _back_to_back), ("written-in-place", _written_in_place),
        ("dump", _dump), *((f"host-values/{name}", check) for name, check in host_value_cases.CHECKS.items()),
    ]  # fmt: skip
    for name, check in checks:
        yield Case(f"graphs/{name}", partial(_on, target, check))
    for operation in ops.catalogue().values():
        yield Case(f"graphs/replay/{operation.name}", partial(check_replay, target, operation))


def _on(target: Target, check: Check) -> None:
    check(target.activated())


def _input(backend: Backend, value: float = 1.0) -> Tensor:
    return torch.full(SHAPE, value, dtype=backend.limits.dtypes[0], device=backend.device.torch)


def _holds(tensor: Tensor, value: float, what: str) -> None:
    found = sorted(set(tensor.cpu().float().flatten().tolist()))
    require(found == [value], f"{what}: {found[:4]} in place of {value}")


def _inputs_in_place(backend: Backend) -> None:
    x, graph = _input(backend), backend.graph()
    output = graph.capture(lambda: x * 2 + 1)
    for value in (1.0, 5.0, -3.0, 5.0):
        x.fill_(value)
        graph.replay()
        _holds(output, 2 * value + 1, f"a replay after the input was set to {value}")


def _addresses(backend: Backend) -> None:
    x, graph = _input(backend), backend.graph()
    output = graph.capture(lambda: x * 2)
    place = output.data_ptr()
    for _ in range(3):
        graph.replay()
    require(graph.outputs is output, "Graph.outputs is not what capture() returned")
    require(graph.outputs.data_ptr() == place, "the output moved")


def _structure(backend: Backend) -> None:
    x, graph = _input(backend), backend.graph()
    made = graph.capture(lambda: {"twice": x * 2, "both": (x + 1, [x - 1])})
    x.fill_(4.0)
    graph.replay()
    _holds(made["twice"], 8.0, "a tensor in a dict")
    _holds(made["both"][0], 5.0, "a tensor in a tuple")
    _holds(made["both"][1][0], 3.0, "a tensor in a list")


def _glue(backend: Backend) -> None:
    """What stands between operations is replayed, too: views, parts, casts, constants."""
    x, graph = _input(backend), backend.graph()
    weight = torch.ones(SHAPE[1], dtype=x.dtype, device=x.device)

    def function() -> Tensor:
        first, second = x.chunk(2, dim=-1)
        both = torch.cat((second + 1, first), dim=-1)
        normed = ops.rms_norm(both.float().to(x.dtype), weight, 1e-6)
        return (normed.t().contiguous().t() + both)[1:5]

    output = graph.capture(function)
    for value in (3.0, 0.5):
        x.fill_(value)
        graph.replay()
        expected = function().cpu()
        torch.testing.assert_close(output.cpu(), expected)


def _pool(backend: Backend) -> None:
    x = _input(backend)
    first, second = backend.graph(), backend.graph()
    large = first.capture(lambda: (x + 1) * 2)
    small = second.capture(lambda: (x[:4] + 3) * 2, pool=first.pool)
    for value in (1.0, 2.0, 7.0):
        x.fill_(value)
        second.replay()
        _holds(small, (value + 3) * 2, "the smaller graph of a pool")
        first.replay()
        _holds(large, (value + 1) * 2, "the larger graph of a pool")


def _several(backend: Backend) -> None:
    x = _input(backend)
    graphs = [backend.graph() for _ in range(6)]
    outputs = [graph.capture(partial(torch.mul, x, number)) for number, graph in enumerate(graphs)]
    x.fill_(3.0)
    for number in (4, 0, 5, 1, 3, 2):
        graphs[number].replay()
    for number, output in enumerate(outputs):
        _holds(output, 3.0 * number, f"graph {number} of several without a shared pool")


def _hold(backend: Backend) -> None:
    """Outputs that are held stay as they are while other graphs of the pool are captured and replayed."""
    x = _input(backend)
    first, second = backend.graph(), backend.graph()
    held = first.capture(lambda: x + 1, hold=True)
    x.fill_(5.0)
    first.replay()
    other = second.capture(lambda: (held * 2, x * 3 + 7), pool=first.pool)
    first.replay()
    second.replay()
    _holds(held, 6.0, "held outputs, after another graph of the pool")
    _holds(other[0], 12.0, "what a graph computes of another's held outputs")
    first.let_go()
    second.replay()
    _holds(other[1], 22.0, "a graph after another let go of its outputs")


def _pieces(backend: Backend) -> None:
    """Three graphs of one block and pool, with eager work between them, which no replay repeats."""
    x, kept, graphs = _input(backend), _input(backend, 0.0), [backend.graph() for _ in range(3)]
    with backend.capturing() as captures:
        captures.begin(graphs[0])
        first = captures.end(x + 1)
        kept.copy_(first * 3)
        captures.begin(graphs[1], pool=graphs[0].pool)
        second = captures.end(kept + x)
        kept.add_(100)
        captures.begin(graphs[2], pool=graphs[1].pool)
        third = captures.end(kept * 2)
    backend.device.synchronize()
    for value in (1.0, 5.0, -3.0, 5.0, 2.0):
        x.fill_(value)
        graphs[0].replay()
        kept.copy_(first * 2)
        graphs[1].replay()
        _holds(second, 3 * value + 2, "the second graph of a block")
        graphs[2].replay()
        _holds(third, 4 * value + 4, "the third graph of a block")
    again = backend.graph()
    try:
        with backend.capturing() as captures:
            captures.begin(again, pool=graphs[0].pool)
            captures.end(x + 1)
            raise Planted("between two captures")
    except Planted:
        again.replay()
    _holds(again.outputs, 3.0, "a graph that was ended before its block raised")


class _Nothing(TorchDispatchMode):
    """Changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _modes(backend: Backend) -> None:
    """A mode that the code enters in a capture is left in it; one that is not is named."""
    x, graph, mode = _input(backend), backend.graph(), _Nothing()  # type: ignore[no-untyped-call]

    def inside() -> Tensor:
        with mode:
            y = x * 2
        return y + 1

    output = graph.capture(inside)
    x.fill_(3.0)
    graph.replay()
    _holds(output, 7.0, "a capture of a function that enters a mode of torch")
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
    _works_again(backend, graph, x)


def _reset(backend: Backend) -> None:
    x, graph = _input(backend), backend.graph()
    graph.capture(lambda: x * 2)
    graph.reset()
    _refused(graph, "replay() after reset()")
    output = graph.capture(lambda: x * 3)
    x.fill_(2.0)
    graph.replay()
    _holds(output, 6.0, "a graph that was captured again after reset()")


def _refused(graph: Graph, what: str) -> None:
    try:
        graph.replay()
    except GraphError:
        return
    raise AssertionError(f"{what} raised no GraphError")


def _order_of_use(backend: Backend) -> None:
    x, graph = _input(backend), backend.graph()
    _refused(graph, "replay() before capture()")
    graph.capture(lambda: x * 2)
    try:
        graph.capture(lambda: x * 3)
    except GraphError:
        return
    raise AssertionError("a second capture() without reset() raised no GraphError")


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
    x, graph = _input(backend), backend.graph()
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
    require(found is error, f"the captured function raised {error!r}, and capture() {found!r} in place of it")
    require(error.__cause__ is cause, f"the cause of the exception became {error.__cause__!r}")
    _works_again(backend, graph, x)


def _works_again(backend: Backend, graph: Graph, x: Tensor) -> None:
    """After a capture that failed: the graph is empty, and it, eager work and another thread's graph go on."""
    _refused(graph, "replay() after a capture that failed")
    x.fill_(4.0)
    _holds(x * 3, 12.0, "an eager computation after a capture that failed")
    backend.device.empty_cache()
    output = graph.capture(lambda: x * 2)
    graph.replay()
    _holds(output, 8.0, "a capture after one that failed")
    with ThreadPoolExecutor(1) as thread:
        captured = thread.submit(_captured_elsewhere, backend).result(timeout=SECONDS)
    _holds(captured, 3.0, "a capture in another thread after one that failed")


def _captured_elsewhere(backend: Backend) -> Tensor:
    x, graph = _input(backend), backend.graph()
    output: Tensor = graph.capture(lambda: x + 2)
    graph.replay()
    return output.cpu()


def _lacks_memory(backend: Backend) -> None:
    """A capture for which there is no memory says so, whichever exception that is on the device."""
    x, graph = _input(backend), backend.graph()
    found: BaseException | None = None
    try:
        graph.capture(lambda: x + torch.empty(1 << 60, dtype=torch.uint8, device=x.device)[0])
    except CaptureError as error:
        found = error
    require(found is not None, "an exabyte was allocated in a capture")
    require(found is not None and found.__cause__ is not None, "the CaptureError does not have its cause chained")
    del found
    _works_again(backend, graph, x)


def _value_read(backend: Backend) -> None:
    """A value that is read on the host is refused, or else followed; it is not frozen into the graph."""
    x, graph = _input(backend), backend.graph()
    try:
        output = graph.capture(lambda: x * float(x[0, 0].item()))
    except CaptureError as error:
        require(bool(error.problem and error.remedy), "the CaptureError says nothing")
    else:
        x.fill_(3.0)
        graph.replay()
        _holds(output, 9.0, "a replay of a function that reads a value on the host")
    graph.reset()
    output = graph.capture(lambda: x + 1)
    graph.replay()
    _holds(output, float(x.cpu()[0, 0]) + 1, "a capture after one that was refused")


def _on_a_stream(backend: Backend) -> None:
    x, graph = _input(backend), backend.graph()
    output = graph.capture(lambda: x * 3, stream=backend.device.stream())
    x.fill_(2.0)
    graph.replay()
    _holds(output, 6.0, "a graph captured on a stream of the caller's")


def _back_to_back(backend: Backend) -> None:
    """Replays that are not waited for run in order with what is enqueued between them."""
    x, graph, found = _input(backend), backend.graph(), []
    output = graph.capture(lambda: (x * 2 + 1) * 2)
    for number in range(10):
        x.fill_(float(number))
        graph.replay()
        found.append(output.clone())
    for number, each in enumerate(found):
        _holds(each, 4.0 * number + 2, f"replay {number} of several without a wait")


def _written_in_place(backend: Backend) -> None:
    total, graph = _input(backend, 0.0), backend.graph()
    graph.capture(lambda: total.add_(1))
    total.fill_(0.0)
    for _ in range(5):
        graph.replay()
    _holds(total, 5.0, "a tensor that five replays add 1 to")


def _dump(backend: Backend) -> None:
    x, graph = _input(backend), backend.graph()
    graph.capture(lambda: x * 2)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "graph.txt"
        graph.dump(path)
        require(path.exists() and path.stat().st_size > 0, "dump() wrote nothing")
