"""Cases of closing: runners and backends free their resources, and raise ClosedError if used afterwards."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from hal import ops
from hal.drivers.backend import Backend, active_backend
from hal.errors import ClosedError
from hal.execution.runner import Runner
from hal.generation.generate import generate
from hal.generation.sampling_params import SamplingParams
from hal.step import StateSpec
from hal.testing.case import Case, raises, require
from hal.testing.model_cases import SLOW, ModelRun
from hal.testing.target import Target

SECONDS = 120
"""Timeout within which a thread must notice that its runner is closed."""
SLACK = 1 << 20
"""Bytes that a process may keep, such as a mask or a workspace; far below the size of a cache or a graph."""


def cases(target: Target) -> Iterator[Case]:
    """Yield ``closing/...``."""
    for mode in target.backend.compilers:
        yield Case(f"closing/runner/{mode}", partial(_runner, target, mode))
        if mode not in SLOW:
            yield Case(f"closing/while-running/{mode}", partial(_while_running, target, mode))
    yield Case("closing/backend", partial(_backend, target))
    if "graph" in target.backend.compilers:
        yield Case("closing/graphs", partial(_graphs, target))
    yield Case("closing/others", partial(_others, target))


refused = partial(raises, ClosedError)
"""Raise AssertionError unless a use raises ClosedError."""


def _made(target: Target, mode: str) -> Runner:
    return ModelRun(target, "qwen3", target.backend.limits.dtypes[0], mode).new_runner()


def _tokens(runner: Runner) -> list[int]:
    return [each.token_id for each in generate(runner, [[1, 2, 3]], SamplingParams(max_new_tokens=3))]


def _allocated(backend: Backend) -> int:
    backend.device.synchronize()
    return backend.device.memory_stats().allocated


def _runner(target: Target, mode: str) -> None:
    """Check that close() frees graphs, streams and cache, and that backend and model can create another runner."""
    runner = _made(target, mode)
    backend, model = runner.backend, runner.model
    expected = _tokens(runner)
    runner.close()
    gc.collect()
    before = _allocated(backend)
    with Runner(model, backend) as runner:
        require(_tokens(runner) == expected, "a runner created after closing one generates other tokens")
        batch = runner.batch([[4]], [[1]])
        cached = [weakref.ref(each) for _, each in runner.states.tensors()]
    runner.close()
    require(runner.closed, "`closed` of a closed runner is False")
    alive = sum(each() is not None for each in cached)
    require(not alive, f"{alive} of {len(cached)} tensors of the cache are alive after the runner was closed")
    require(backend.streams_in_graphs == 0, f"graphs hold {backend.streams_in_graphs} streams after that")
    if backend.device.torch.type != "cpu":  # the CPU does not report allocated memory
        left = _allocated(backend) - before
        require(left <= SLACK, f"{left} bytes stay allocated after the runner was closed")
    refused(lambda: runner.step(batch), "a step of a closed runner")
    refused(lambda: runner.batch([[4]], [[1]]), "a batch of a closed runner")
    refused(lambda: runner.states, "the states of a closed runner")
    refused(lambda: _tokens(runner), "generate() on a closed runner")
    backend.close()


def _while_running(target: Target, mode: str) -> None:
    """Check that a generating thread finishes its step and then raises ClosedError."""
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
    require(not thread.is_alive(), "a thread still runs steps of a closed backend")
    found = [type(each).__name__ for each in raised]
    require(found == [ClosedError.__name__], f"a thread whose runner was closed raised {', '.join(found) or 'nothing'}")


def _backend(target: Target) -> None:
    """Check that closing a backend closes its runners, and that every use of it raises ClosedError."""
    with ModelRun(target, "qwen3", target.backend.limits.dtypes[0], "eager").new_runner() as runner:
        backend, model, spec = runner.backend, runner.model, runner.spec
        kept = backend.ops.rms_norm
        backend.close()
        require(runner.closed and backend.closed, "the runner of a closed backend is open")
    backend.close()
    require(active_backend() is None and not backend.active, "a closed backend is active")
    x = torch.ones(2, 64, dtype=spec.dtype, device=backend.device.torch)
    refused(lambda: ops.rms_norm(x, x[0], 1e-6), "an operation of hal.ops after its backend was closed")
    refused(lambda: kept(x, x[0], 1e-6), "an operation of a closed backend")
    refused(lambda: backend.ops.silu_and_mul(x), "an operation of a closed backend")
    refused(backend.activate, "activate() of a closed backend")
    refused(backend.__enter__, "a with block of a closed backend")
    refused(lambda: backend.configure(backend.config), "configure() of a closed backend")
    refused(lambda: Runner(model, backend), "a runner on a closed backend")
    refused(
        lambda: backend.allocate(StateSpec(spec.layers[:1], spec.dtype, 2, spec.block_size)),
        "kv_cache() of a closed backend",
    )
    if "graph" in target.backend.compilers:
        refused(backend.graph, "graph() of a closed backend")


def _graphs(target: Target) -> None:
    """Check that closing a backend frees graphs that no runner created."""
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
    """Check that other backends of the driver, active or not, stay usable, and that the driver opens again."""
    mode = "graph" if "graph" in target.backend.compilers else "eager"
    run = ModelRun(target, "qwen3", target.backend.limits.dtypes[0], mode)
    first = run.new_runner()
    expected = _tokens(first)
    with run.new_runner() as second:
        require(_tokens(second) == expected, "a second backend generates other tokens")
        first.backend.activate()
        second.backend.close()
        require(first.backend.active, "closing an inactive backend deactivated the active one")
        require(_tokens(first) == expected, "a backend generates other tokens after another was closed")
    first.backend.close()
    with run.new_runner() as third:
        require(_tokens(third) == expected, "a backend opened after closing another generates other tokens")
    third.backend.close()
