"""Cases of graphs: capture and replay, host values, memory pools, errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from hal import ops
from hal.drivers.backend import Backend
from hal.errors import GraphError
from hal.ops.declaration.operation import Operation
from hal.ops.tolerance import assert_agree
from hal.testing import failed_capture_cases, host_value_cases
from hal.testing.case import Case, Failure, raises, require
from hal.testing.compared_call import prepare_weights
from hal.testing.failed_capture_cases import SHAPE, Planted, filled, holds, works_again
from hal.testing.operation_calls import Call, describe, largest_sample, reference, tensors
from hal.testing.stream_cases import current_stream
from hal.testing.target import Target

Check = Callable[[Backend], None]


def cases(target: Target) -> Iterator[Case]:
    """Yield ``graphs/<check>``, ``graphs/host-values/<check>`` and ``graphs/replay/<operation>``."""
    checks: list[tuple[str, Check]] = [
        ("inputs-in-place", inputs_in_place),
        ("addresses", _addresses),
        ("structure", _structure),
        ("no-python", _glue),
        ("pool", _pool),
        ("several", _several),
        ("reserved-outputs", _reserved_outputs),
        ("reset", _reset),
        ("pieces", _pieces),
        ("broken-piece", _broken_piece),
        *failed_capture_cases.CHECKS.items(),
        ("on-a-stream", _on_a_stream),
        ("back-to-back", _back_to_back),
        ("written-in-place", _written_in_place),
        ("dump", _dump),
        *((f"host-values/{name}", check) for name, check in host_value_cases.CHECKS.items()),
    ]
    for name, check in checks:
        yield Case(f"graphs/{name}", partial(_on, target, check))
    for operation in ops.catalogue().values():
        yield Case(f"graphs/replay/{operation.name}", partial(check_replay, target, operation))


def _on(target: Target, check: Check) -> None:
    check(target.activated())


def inputs_in_place(backend: Backend) -> None:
    """Check that each replay reads its input anew."""
    x, graph = filled(backend), backend.graph()
    output = graph.capture(lambda: x * 2 + 1)
    for value in (1.0, 5.0, -3.0, 5.0):
        x.fill_(value)
        graph.replay()
        holds(output, 2 * value + 1, f"a replay after the input was set to {value}")


def _addresses(backend: Backend) -> None:
    x, graph = filled(backend), backend.graph()
    output = graph.capture(lambda: x * 2)
    place = output.data_ptr()
    for _ in range(3):
        graph.replay()
    require(graph.outputs is output, "Graph.outputs is not the object that capture() returned")
    require(graph.outputs.data_ptr() == place, "a replay changed the address of the output")


def _structure(backend: Backend) -> None:
    x, graph = filled(backend), backend.graph()
    made = graph.capture(lambda: {"twice": x * 2, "both": (x + 1, [x - 1])})
    x.fill_(4.0)
    graph.replay()
    holds(made["twice"], 8.0, "a tensor in a dict")
    holds(made["both"][0], 5.0, "a tensor in a tuple")
    holds(made["both"][1][0], 3.0, "a tensor in a list")


def _glue(backend: Backend) -> None:
    """What stands between operations is replayed, too: views, parts, casts, constants."""
    x, graph = filled(backend), backend.graph()
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
    x = filled(backend)
    first, second = backend.graph(), backend.graph()
    large = first.capture(lambda: (x + 1) * 2)
    small = second.capture(lambda: (x[:4] + 3) * 2, pool=first.pool)
    for value in (1.0, 2.0, 7.0):
        x.fill_(value)
        second.replay()
        holds(small, (value + 3) * 2, "the smaller graph of a pool")
        first.replay()
        holds(large, (value + 1) * 2, "the larger graph of a pool")


def _several(backend: Backend) -> None:
    x = filled(backend)
    graphs = [backend.graph() for _ in range(6)]
    outputs = [graph.capture(partial(torch.mul, x, number)) for number, graph in enumerate(graphs)]
    x.fill_(3.0)
    for number in (4, 0, 5, 1, 3, 2):
        graphs[number].replay()
    for number, output in enumerate(outputs):
        holds(output, 3.0 * number, f"graph {number} of several without a shared pool")


def _reserved_outputs(backend: Backend) -> None:
    """Outputs that are held stay as they are while other graphs of the pool are captured and replayed."""
    x = filled(backend)
    first, second = backend.graph(), backend.graph()
    held = first.capture(lambda: x + 1, reserve_outputs=True)
    x.fill_(5.0)
    first.replay()
    other = second.capture(lambda: (held * 2, x * 3 + 7), pool=first.pool)
    first.replay()
    second.replay()
    holds(held, 6.0, "held outputs, after another graph of the pool")
    holds(other[0], 12.0, "what a graph computes of another's held outputs")
    first.release_outputs()
    second.replay()
    holds(other[1], 22.0, "a graph after another let go of its outputs")


def _pieces(backend: Backend) -> None:
    """Three graphs of one block and pool, with eager work between them, which no replay repeats."""
    x, kept, graphs = filled(backend), filled(backend, 0.0), [backend.graph() for _ in range(3)]
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
        holds(second, 3 * value + 2, "the second graph of a block")
        graphs[2].replay()
        holds(third, 4 * value + 4, "the third graph of a block")
    again = backend.graph()
    try:
        with backend.capturing() as captures:
            captures.begin(again, pool=graphs[0].pool)
            captures.end(x + 1)
            raise Planted("between two captures")
    except Planted:
        again.replay()
    holds(again.outputs, 3.0, "a graph that was ended before its block raised")


def _broken_piece(backend: Backend) -> None:
    """What is raised inside the second capture of a block comes out as it is; the first graph stays captured."""
    x, graphs, found = filled(backend), [backend.graph() for _ in range(2)], list[BaseException]()
    error = KeyboardInterrupt("planted")
    try:
        with backend.capturing() as captures:
            captures.begin(graphs[0])
            captures.end(x + 1)
            captures.begin(graphs[1], pool=graphs[0].pool)
            x.add_(1)
            raise error
    except KeyboardInterrupt as raised:
        found.append(raised)
    require(found == [error] and error.__cause__ is None, f"{error!r} inside a capture became {found}")
    x.fill_(5.0)
    graphs[0].replay()
    holds(graphs[0].outputs, 6.0, "the graph before one whose capture raised")
    works_again(backend, graphs[1], x)


def _reset(backend: Backend) -> None:
    x, graph = filled(backend), backend.graph()
    graph.capture(lambda: x * 2)
    graph.reset()
    raises(GraphError, graph.replay, "replay() after reset()")
    output = graph.capture(lambda: x * 3)
    x.fill_(2.0)
    graph.replay()
    holds(output, 6.0, "a graph that was captured again after reset()")


def _on_a_stream(backend: Backend) -> None:
    x, graph, before = filled(backend), backend.graph(), current_stream(backend.device)
    output = graph.capture(lambda: x * 3, stream=backend.device.stream())
    require(current_stream(backend.device) == before, "a capture on a stream left that stream current")
    x.fill_(2.0)
    graph.replay()
    holds(output, 6.0, "a graph captured on a stream of the caller's")


def _back_to_back(backend: Backend) -> None:
    """Replays that are not waited for run in order with what is enqueued between them."""
    x, graph, found = filled(backend), backend.graph(), []
    output = graph.capture(lambda: (x * 2 + 1) * 2)
    for number in range(10):
        x.fill_(float(number))
        graph.replay()
        found.append(output.clone())
    for number, each in enumerate(found):
        holds(each, 4.0 * number + 2, f"replay {number} of several without a wait")


def _written_in_place(backend: Backend) -> None:
    total, graph = filled(backend, 0.0), backend.graph()
    graph.capture(lambda: total.add_(1))
    total.fill_(0.0)
    for _ in range(5):
        graph.replay()
    holds(total, 5.0, "a tensor that five replays add 1 to")


def _dump(backend: Backend) -> None:
    x, graph = filled(backend), backend.graph()
    graph.capture(lambda: x * 2)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "graph.txt"
        graph.dump(path)
        require(path.exists() and path.stat().st_size > 0, "dump() wrote nothing")


def check_replay(target: Target, operation: Operation) -> None:
    """Capture a call, overwrite its arguments, replay the graph and compare with the reference.

    Raises:
        Failure: results or mutated arguments differ from the reference's.
        NotApplicable: the backend's cache layout differs from the samples'.
    """
    backend = target.activated()
    target.require_canonical(operation)
    dtype, names = backend.limits.dtypes[0], list(operation.signature.parameters)
    call = Call(operation, dtype, largest_sample(operation), "replay")
    kept = [names.index(name) for name in operation.weights]
    given = call.arguments(backend.device.torch, 0)
    later, wanted = call.arguments(backend.device.torch, 1), call.arguments("cpu", 1)
    for place in kept:  # weights keep their values: their layout is the driver's
        wanted[place] = None if given[place] is None else given[place].cpu()
    with torch.inference_mode():
        given = prepare_weights(backend, operation, given, dtype)
        expected = reference(operation, wanted)
    graph = backend.graph()
    outputs = graph.capture(lambda: operation.function(*given))
    with torch.inference_mode():
        for place, (mine, other) in enumerate(zip(given, later, strict=True)):
            if isinstance(mine, Tensor) and place not in kept and names[place] not in operation.host:
                mine.copy_(other)
    graph.replay(**{name: later[names.index(name)] for name in operation.host})
    backend.device.synchronize()
    problems = list(_differences(operation, dtype, outputs, expected, "result"))
    for name in operation.mutates:
        place = names.index(name)
        problems += _differences(operation, dtype, given[place], wanted[place], f"the argument {name}")
    if problems:
        raise Failure([f"after a replay, {each}" for each in problems], operation.name, *describe(operation, wanted))


def _differences(operation: Operation, dtype: torch.dtype, found: Any, expected: Any, what: str) -> list[str]:
    try:
        assert_agree(operation, dtype, tensors(found), tensors(expected), what)
    except AssertionError as error:
        return [" ".join(str(error).split())]
    return []
