"""Tests for closing runners and backends: what is released, which calls wait, and the errors afterwards."""

from __future__ import annotations

import gc
import platform
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hal.backends.cpu.driver import CpuBackend, CpuOptions
from helpers.thorough import EXHAUSTIVE, MODE, thorough
from torch import Tensor

import hal
from hal import ops
from hal.device.closing import Uses
from hal.errors import ClosedError, DeviceError, GraphError

NORM = (torch.ones(2, 8), torch.ones(8), 1e-6)
CACHE = 64 << 20
"""Bytes of each tensor of the cache: enough to be visible in the process's memory."""


@pytest.fixture(autouse=True)
def active_again() -> Iterator[None]:
    yield
    hal.open("cpu")


def made(trained: Path, compiler: str = "eager", num_tokens: int = 2048) -> hal.Runner:
    backend = hal.open(
        {
            "backend": "cpu",
            "dtype": "float32",
            "cache": {"num_tokens": num_tokens},
            "compilation": {"compiler": compiler, "capture_sizes": [1, 2]},
        }
    )
    return hal.Runner(hal.load_model(trained, backend), backend)


def tokens(runner: hal.Runner, count: int = 4) -> list[int]:
    return [each.token_id for each in hal.generate(runner, [[5, 6, 7]], hal.SamplingParams(max_new_tokens=count))]


@thorough(MODE, r"\[(eager|piecewise)")
@pytest.mark.parametrize("compiler", ["eager", "graph", "piecewise", "piecewise_eager"])
def test_a_runner_gives_its_memory_back_at_once(trained: Path, compiler: str) -> None:
    num_tokens = CACHE // 4 // 128
    gc.disable()
    try:
        with made(trained, compiler, num_tokens) as runner:
            backend = runner.backend
            tokens(runner)
            assert runner.spec.nbytes >= 8 * CACHE // 2
            tensors = [weakref.ref(each) for _, each in runner.states.tensors()]
            during = backend.device.memory_stats().allocated
        assert during - backend.device.memory_stats().allocated > runner.spec.nbytes * 0.9
        assert not [each for each in tensors if each() is not None]
        assert (backend.streams_in_graphs, len(backend.captured_graphs), len(backend.runners)) == (0, 0, 0)
    finally:
        gc.enable()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator of another C library")
def test_memory_between_live_allocations_is_given_back(cpu: hal.Backend) -> None:
    """glibc places a large tensor in the freed memory of earlier ones, if there is some, and does not unmap that."""
    size = 28 << 20  # below the largest threshold from which glibc maps memory for each allocation
    torch.empty(size + (1 << 20), dtype=torch.uint8)  # When it is freed, the threshold becomes its size.
    pairs = [(torch.ones(size, dtype=torch.uint8), torch.ones(1 << 20, dtype=torch.uint8)) for _ in range(4)]
    between = [small for _, small in pairs]
    del pairs
    large = [torch.ones(size, dtype=torch.uint8) for _ in range(4)]
    during = cpu.device.memory_stats().allocated
    del large
    cpu.device.empty_cache()
    assert during - cpu.device.memory_stats().allocated > 0.9 * 4 * size
    del between


def test_whatever_is_used_afterwards_says_so(trained: Path) -> None:
    """The conformance suite checks that other uses raise."""
    runner = made(trained, "graph")
    backend, graph = runner.backend, runner.backend.graph()
    graph.capture(lambda: torch.ones(2) * 2)
    runner.close()
    for use in (
        lambda: runner.slots,
        lambda: runner.model,
        runner.__enter__,
    ):
        with pytest.raises(ClosedError, match="this runner on the backend cpu is closed\n  remedy: create another"):
            use()
    assert not backend.closed
    graph.replay()
    backend.close()
    for use in (
        lambda: hal.load_model(trained, backend),
        lambda: backend.ops.rms_norm(*NORM),
    ):
        with pytest.raises(ClosedError, match="the backend cpu is closed\n  remedy: open it again"):
            use()
    for use in (lambda: graph.outputs, lambda: graph.pool):
        with pytest.raises(ClosedError, match="a closed graph"):
            use()
    backend.close()
    runner.close()
    graph.close()


def test_operations_after_the_active_backend_was_closed() -> None:
    """They do not fall back to the references, as they do before any backend is opened."""
    with hal.open("cpu"):
        expected = ops.rms_norm(*NORM)
    assert hal.active_backend() is None
    with pytest.raises(
        ClosedError, match=r"rms_norm was called while hal\.ops dispatches to the backend cpu, which is closed"
    ):
        ops.rms_norm(*NORM)
    with pytest.raises(ClosedError, match=r"open a backend with hal\.open, or call activate\(\)"):
        torch.ops.hal.rms_norm(*NORM)
    torch.testing.assert_close(ops.operation("rms_norm").reference(*NORM), expected)
    hal.open("cpu")
    torch.testing.assert_close(ops.rms_norm(*NORM), expected)


def test_what_torch_compile_made_says_that_its_backend_is_closed() -> None:
    with hal.open("cpu"):
        compiled = torch.compile(lambda x: ops.rms_norm(x, *NORM[1:]), backend="hal")
        compiled(NORM[0])
    with pytest.raises(ClosedError, match="the backend cpu is closed"):
        compiled(NORM[0])


class Slow(CpuBackend):
    """A model whose step waits for an event."""

    def __init__(self) -> None:
        super().__init__(CpuOptions(native=False, pack_weights=False))
        self.reached, self.go_on, self.released = threading.Event(), threading.Event(), 0
        kernel = self.kernels["silu_and_mul"]

        def slowly(x: Tensor) -> Tensor:
            self.reached.set()
            assert self.go_on.wait(60)
            return kernel(x)

        self.kernels = MappingProxyType({**self.kernels, "silu_and_mul": slowly})

    def _release(self) -> None:
        self.released += 1


def started(run: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []

    def noted() -> None:
        try:
            found.append(run())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=noted)
    thread.start()
    return thread, found


def slow_runner(trained: Path) -> tuple[Slow, hal.Runner]:
    backend = Slow()
    backend.configure(hal.config.load({"backend": "cpu", "dtype": "float32", "cache": {"num_tokens": 256}}))
    backend.activate()
    return backend, hal.Runner(hal.load_model(trained, backend), backend)


def test_closing_waits_for_steps_and_refuses_new_ones(trained: Path) -> None:
    backend, runner = slow_runner(trained)
    batch = runner.batch([[5]], [[1]])
    stepping, stepped = started(lambda: runner.step(batch))
    assert backend.reached.wait(60)
    closing, _ = started(backend.close)
    also, _ = started(backend.close)
    while not runner.closed:
        time.sleep(0.001)
    with pytest.raises(ClosedError):
        runner.step(batch)
    assert [closing.is_alive(), also.is_alive(), backend.released] == [True, True, 0]
    backend.go_on.set()
    for thread in (stepping, closing, also):
        thread.join(60)
        assert not thread.is_alive()
    assert stepped[0].logits.shape[0] == 1
    assert backend.released == 1


def test_closing_inside_a_step_or_a_capture_is_refused(trained: Path) -> None:
    runner = made(trained)
    backend, closes = runner.backend, [runner.close, runner.backend.close]
    hook = runner.model.register_forward_hook(lambda *_: closes.pop()())
    batch = runner.batch([[5]], [[1]])
    while closes:
        with pytest.raises(ClosedError, match=r"a call that uses .* tried to close it"):
            runner.step(batch)
    hook.remove()
    for close in (runner.close, backend.close):
        with pytest.raises(GraphError, match="inside a capture"):
            backend.graph().capture(close)
    assert tokens(runner)
    backend.close()


class Mistaken(CpuBackend):
    """A model that raises for one row. It records its caches and graphs."""

    def __init__(self) -> None:
        super().__init__(CpuOptions(native=False, pack_weights=False))
        self.caches: list[weakref.ref[Tensor]] = []
        self.captured: list[hal.vendor.Graph] = []
        kernel = self.kernels["silu_and_mul"]

        def mistaken(x: Tensor) -> Tensor:
            if x.shape[0] == 1:
                raise KeyError("mine")
            return kernel(x)

        self.kernels = MappingProxyType({**self.kernels, "silu_and_mul": mistaken})

    def graph(self) -> hal.vendor.Graph:
        self.captured.append(super().graph())
        return self.captured[-1]

    def allocate(self, spec: hal.step.StateSpec) -> hal.step.StateMemory:
        cache = super().allocate(spec)
        self.caches += [weakref.ref(each) for _, each in cache.tensors()]
        return cache


@thorough(EXHAUSTIVE, r"\[(raise-graph|eager-piecewise\]|raise-piecewise_eager)")
@thorough(MODE, r"\[\w+-piecewise|\[eager-graph")
@pytest.mark.parametrize("compiler", ["graph", "piecewise", "piecewise_eager"])
@pytest.mark.parametrize("on_capture_error", ["raise", "eager"])
def test_a_mistake_in_a_capture_comes_out_and_leaves_nothing(
    trained: Path, compiler: str, on_capture_error: str
) -> None:
    """The graph of four rows has been captured by then."""
    compilation = {"compiler": compiler, "capture_sizes": [1, 4], "on_capture_error": on_capture_error}
    with Mistaken() as backend:
        backend.configure(hal.config.load({"backend": "cpu", "dtype": "float32", "compilation": compilation}))
        backend.activate()
        model = hal.load_model(trained, backend)
        with pytest.raises(KeyError, match="mine"):
            hal.Runner(model, backend)
        gc.collect()
        assert len(backend.captured) > 1
        assert backend.streams_in_graphs == 0
        for graph in backend.captured:
            with pytest.raises((ClosedError, GraphError)):
                graph.replay()
        assert not [each for each in backend.caches if each() is not None]


class Failing(CpuBackend):
    """A device whose synchronize fails, and a driver whose release fails."""

    def __init__(self) -> None:
        super().__init__(CpuOptions(native=False, pack_weights=False))
        self.device.synchronize = self._fails  # type: ignore[method-assign]

    def _fails(self) -> None:
        raise DeviceError("a kernel failed", "run it again")


def test_a_device_that_failed_is_said_and_all_is_freed() -> None:
    backend = Failing()
    graph = backend.graph()
    output = weakref.ref(graph.capture(lambda: torch.ones(4) + 1))
    with pytest.raises(DeviceError, match="a kernel failed"):
        backend.close()
    assert output() is None
    backend.close()
    with pytest.raises(ClosedError):
        graph.replay()


def test_what_the_block_raised_comes_first() -> None:
    def block() -> None:
        with Failing() as backend:
            graph = backend.graph()
            graph.capture(lambda: torch.ones(4) + 1)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        block()
    assert any("a kernel failed" in note for note in caught.value.__notes__)


def test_uses_nest_and_count_by_thread() -> None:
    uses = Uses("it", "open it")
    with uses, uses, pytest.raises(ClosedError, match="a call that uses it tried to close it"):
        uses.check_not_in_use_by_this_thread()
    uses.check_not_in_use_by_this_thread()
    uses.end()
    with pytest.raises(ClosedError, match="it is closed\n  remedy: open it"), uses:
        raise AssertionError
