"""Closing: runners and backends give back what they hold, at once, and say so when they are used afterwards."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hal import ops
from hal.drivers.backend import Backend, active_backend
from hal.errors import ClosedError
from hal.execution.runner import Runner
from hal.generation.generate import generate
from hal.generation.sampling import SamplingParams
from hal.step import StateSpec
from hal.testing.case import Case, require
from hal.testing.models.model_cases import SLOW, ModelRun
from hal.testing.target import Target

SECONDS = 120
"""That another thread gets to meet the end of its runner."""
SLACK = 1 << 20
"""Bytes that a process may keep of what it made once, such as a mask or a workspace; far below a cache or a graph."""


def cases(target: Target) -> Iterator[Case]:
    """``closing/...``"""
    for mode in target.backend.compilers:
        yield Case(f"closing/runner/{mode}", partial(_runner, target, mode))
        if mode not in SLOW:
            yield Case(f"closing/while-running/{mode}", partial(_while_running, target, mode))
    yield Case("closing/backend", partial(_backend, target))
    if "graph" in target.backend.compilers:
        yield Case("closing/graphs", partial(_graphs, target))
    yield Case("closing/others", partial(_others, target))


def refused(use: Callable[[], Any], what: str) -> None:
    """Raise AssertionError unless a use of something closed raises ClosedError."""
    try:
        use()
    except ClosedError as error:
        require(bool(error.problem and error.remedy), f"{what}: the ClosedError says nothing")
        return
    raise AssertionError(f"{what} raised no ClosedError")


def _made(target: Target, mode: str) -> Runner:
    return ModelRun(target, "qwen3", target.backend.limits.dtypes[0], mode).made()


def _tokens(runner: Runner, count: int = 3) -> list[int]:
    return [each.token_id for each in generate(runner, [[1, 2, 3]], SamplingParams(max_new_tokens=count))]


def _allocated(backend: Backend) -> int:
    backend.device.synchronize()
    return backend.device.memory_stats().allocated


def _runner(target: Target, mode: str) -> None:
    """Graphs, their streams and the cache go at once; the backend and the model stay, and make another runner."""
    runner = _made(target, mode)
    backend, model = runner.backend, runner.model
    expected = _tokens(runner)
    runner.close()
    gc.collect()
    before = _allocated(backend)
    with Runner(model, backend) as runner:
        require(_tokens(runner) == expected, "a runner after one that was closed gives other tokens")
        batch = runner.batch([[4]], [[1]])
        cached = [weakref.ref(each) for _, each in runner.states.tensors()]
    runner.close()
    require(runner.closed, "a runner that was closed does not say so")
    alive = sum(each() is not None for each in cached)
    require(not alive, f"{alive} of {len(cached)} tensors of the cache are alive after the runner was closed")
    require(backend.streams_in_graphs == 0, f"graphs hold {backend.streams_in_graphs} streams after that")
    if backend.device.torch.type != "cpu":  # which does not tell what is allocated
        left = _allocated(backend) - before
        require(left <= SLACK, f"{left} bytes stay allocated after the runner was closed")
    refused(lambda: runner.step(batch), "a step of a closed runner")
    refused(lambda: runner.batch([[4]], [[1]]), "a batch of a closed runner")
    refused(lambda: runner.states, "the states of a closed runner")
    refused(lambda: _tokens(runner), "generate() on a closed runner")
    backend.close()


def _while_running(target: Target, mode: str) -> None:
    """A thread that generates finishes its step, and is told then."""
    runner = _made(target, mode)
    begun, raised = threading.Event(), []

    def run() -> None:
        try:
            while True:
                for _ in generate(runner, [[1, 2, 3]], SamplingParams(max_new_tokens=20)):
                    begun.set()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    begun.wait(SECONDS)
    runner.backend.close()
    thread.join(SECONDS)
    require(not thread.is_alive(), "a thread still runs steps of a backend that was closed")
    found = [type(each).__name__ for each in raised]
    require(found == [ClosedError.__name__], f"a thread whose runner was closed met {', '.join(found)}")


def _backend(target: Target) -> None:
    """It takes its runners with it, and every use of it says that it is closed."""
    with ModelRun(target, "qwen3", target.backend.limits.dtypes[0], "eager").made() as runner:
        backend, model, spec = runner.backend, runner.model, runner.spec
        kept = backend.ops.rms_norm
        backend.close()
        require(runner.closed and backend.closed, "a runner outlives its backend")
    backend.close()
    require(active_backend() is None and not backend.active, "a backend that was closed is active")
    x = torch.ones(2, 64, dtype=spec.dtype, device=backend.device.torch)
    refused(lambda: ops.rms_norm(x, x[0], 1e-6), "hal.ops, whose backend was closed,")
    refused(lambda: kept(x, x[0], 1e-6), "an operation of a closed backend")
    refused(lambda: backend.ops.silu_and_mul(x), "an operation of a closed backend")
    refused(backend.activate, "activate() of a closed backend")
    refused(backend.__enter__, "a with block of a closed backend")
    refused(lambda: backend.configure(backend.config), "configure() of a closed backend")
    refused(lambda: Runner(model, backend), "a runner on a closed backend")
    refused(lambda: backend.allocate(StateSpec(spec.layers[:1], spec.dtype, 2, spec.block_size)),
            "kv_cache() of a closed backend")  # fmt: skip
    if "graph" in target.backend.compilers:
        refused(backend.graph, "graph() of a closed backend")


def _graphs(target: Target) -> None:
    """Those that nobody's runner made go with the backend, too."""
    with target.open() as backend:
        x = torch.ones(1 << 20, dtype=backend.limits.dtypes[0], device=backend.device.torch)
        before = _allocated(backend)
        graph, empty = backend.graph(), backend.graph()
        with torch.inference_mode():
            output: Tensor | None = graph.capture(lambda: (x + 1) * 2)
        graph.replay()
        held, output = weakref.ref(output), None
    require(held() is None, "a graph's outputs are alive after its backend was closed")
    if backend.device.torch.type != "cpu":
        left = _allocated(backend) - before
        require(left <= SLACK, f"{left} bytes stay allocated after the backend of a graph was closed")
    for each, what in ((graph, "a graph"), (empty, "an empty graph")):
        refused(each.replay, f"replay() of {what} whose backend was closed")
        refused(partial(each.capture, lambda: x + 1), f"capture() of {what} whose backend was closed")


def _others(target: Target) -> None:
    """Another backend of the driver goes on, the active one included; and the driver opens again."""
    mode = "graph" if "graph" in target.backend.compilers else "eager"
    run = ModelRun(target, "qwen3", target.backend.limits.dtypes[0], mode)
    first = run.made()
    expected = _tokens(first)
    with run.made() as second:
        require(_tokens(second) == expected, "a second backend gives other tokens")
        first.backend.activate()
        second.backend.close()
        require(first.backend.active, "closing a backend that was not active took the active one's place")
        require(_tokens(first) == expected, "a backend gives other tokens when another was closed")
    first.backend.close()
    with run.made() as third:
        require(_tokens(third) == expected, "a backend that was opened after one was closed gives other tokens")
    third.backend.close()
