"""Cases of leaks: repeating an action must not increase memory use."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from hal import ops
from hal.ops.declaration.operation import Operation
from hal.testing.case import Case
from hal.testing.model_cases import ModelRun
from hal.testing.operation_calls import Call, largest_sample
from hal.testing.target import Target

WARM, ROUNDS = 6, 24
"""Number of repetitions before and after the first measurement."""
HOST_SLACK = 48 << 20
"""Growth of the process in bytes that is allowed where only host memory can be measured."""
ELEMENTS = 1 << 20
"""Size of the tensors that graphs compute, large enough for a leak to exceed :data:`HOST_SLACK`."""


def cases(target: Target) -> Iterator[Case]:
    """Yield ``leaks/...``."""
    yield Case("leaks/graphs", partial(_graphs, target))
    yield Case("leaks/failed-captures", partial(_failed_captures, target))
    yield Case("leaks/streams", partial(_streams, target))
    for operation in ops.catalogue().values():
        yield Case(f"leaks/operations/{operation.name}", partial(_operation, target, operation))
    for mode in target.backend.compilers:
        yield Case(f"leaks/steps/{mode}", partial(_steps, target, mode))


def check_growth(target: Target, once: Callable[[], None], what: str) -> None:
    """Repeat ``once`` and compare live tensors and allocated bytes before and after.

    Raises:
        AssertionError: either grows with the number of rounds.
    """
    with _only_new_objects():
        for _ in range(WARM):
            once()
        before_tensors, before_bytes = _alive(target)
        for _ in range(ROUNDS):
            once()
        after_tensors, after_bytes = _alive(target)
    more, grown = after_tensors - before_tensors, after_bytes - before_bytes
    if more >= ROUNDS // 2:
        raise AssertionError(f"after {ROUNDS} {what}, {more} more tensors are alive")
    allowed = HOST_SLACK if target.device.torch.type == "cpu" else ROUNDS // 2 * 512
    if grown >= allowed:
        raise AssertionError(f"after {ROUNDS} {what}, {grown} more bytes are allocated")


@contextmanager
def _only_new_objects() -> Iterator[None]:
    """Exclude existing objects from garbage collection; with a compiler loaded, scanning them takes a second.

    Where others have excluded some already, these stay excluded too: including them again would include the others.
    """
    own = gc.get_freeze_count() == 0
    gc.freeze()
    try:
        yield
    finally:
        if own:
            gc.unfreeze()


def _alive(target: Target) -> tuple[int, int]:
    gc.collect()
    target.device.synchronize()
    kinds = Counter(map(type, gc.get_objects()))
    count = sum(number for kind, number in kinds.items() if issubclass(kind, Tensor))
    return count, target.device.memory_stats().allocated


def _graphs(target: Target) -> None:
    backend = target.activated()
    x = torch.ones(ELEMENTS, dtype=backend.limits.dtypes[0], device=backend.device.torch)

    def once() -> None:
        graph = backend.graph()
        graph.capture(lambda: (x + 1) * 2)
        graph.replay()

    check_growth(target, once, "graphs created, replayed and dropped")


def _failed_captures(target: Target) -> None:
    backend = target.activated()
    x = torch.ones(ELEMENTS, dtype=backend.limits.dtypes[0], device=backend.device.torch)
    graph = backend.graph()

    def broken() -> Tensor:
        y = x * 2
        raise KeyError(f"planted, behind {y.shape}")

    def once() -> None:
        try:
            graph.capture(broken)
        except Exception:  # graph_cases checks its type
            return

    check_growth(target, once, "failed captures")


def _streams(target: Target) -> None:
    device = target.device
    x = torch.ones(ELEMENTS, device=device.torch)

    def once() -> None:
        stream, event = device.stream(), device.event()
        with stream:
            y = x + 1
        event.record(stream)
        event.synchronize()
        del y

    check_growth(target, once, "streams and events")


def _operation(target: Target, operation: Operation) -> None:
    backend = target.activated()
    target.require_canonical(operation)
    given = Call(operation, backend.limits.dtypes[0], largest_sample(operation), "leak").arguments(backend.device.torch)

    def once() -> None:
        with torch.inference_mode():
            operation.function(*given)

    check_growth(target, once, f"calls of {operation.name}")


def _steps(target: Target, mode: str) -> None:
    run = ModelRun(target, "qwen3", target.backend.limits.dtypes[0], mode)
    runner = run.shared_runner()
    batch = runner.batch([[3], [4], [5]], [[1], [2], [3]], cached=[2, 3, 4])
    prompt = runner.batch([[1, 2, 3]], [[4]])

    def once() -> None:
        runner.step(prompt)
        runner.step(batch)

    check_growth(target, once, f"steps with the compiler {mode}")
