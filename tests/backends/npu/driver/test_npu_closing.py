"""Tests for closing on the NPU: graphs, streams and memory are released at once, whatever the compiler."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hal.backends.npu import emulator
from helpers.thorough import MODE, thorough

import hal
from hal.errors import ClosedError, DeviceError

Opened = Callable[..., hal.Backend]
COMPILERS = ("eager", "graph", "piecewise", "piecewise_eager", "npugraph_ex")


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Disable garbage collection except for that by `close`."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def opened_for(npu: Opened, compiler: str) -> hal.Backend:
    return npu(
        dtype="bfloat16", cache={"num_tokens": 2048}, compilation={"compiler": compiler, "capture_sizes": [1, 2]}
    )


def allocated() -> int:
    torch.npu.synchronize()
    return torch.npu.memory_allocated()


@thorough(MODE, r"\[(graph|piecewise\w*)\]")
@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_runner_gives_all_back_at_once(npu: Opened, trained: Path, compiler: str) -> None:
    backend = opened_for(npu, compiler)
    empty = allocated()
    model = hal.load_model(trained, backend)
    with hal.Runner(model, backend) as warm:  # one-time allocations of a process, such as masks and workspaces
        list(hal.generate(warm, [[5, 6, 7]], hal.SamplingParams(max_new_tokens=3)))
    loaded, graphs, reserved = allocated(), emulator.live_handles()["graph"], torch.npu.memory_reserved()
    runner = hal.Runner(model, backend)
    list(hal.generate(runner, [[5, 6, 7]], hal.SamplingParams(max_new_tokens=3)))
    assert allocated() >= loaded + runner.spec.nbytes
    assert (backend.streams_in_graphs > 0) == (compiler != "eager")
    runner.close()
    assert backend.streams_in_graphs == 0
    assert emulator.live_handles()["graph"] == graphs
    assert allocated() == loaded
    assert torch.npu.memory_reserved() <= reserved
    del model, warm
    backend.close()
    assert allocated() <= empty


@pytest.mark.usefixtures("uncollected")
def test_a_backend_closes_its_runners_and_graphs(npu: Opened, trained: Path) -> None:
    graphs = emulator.live_handles()["graph"]
    with opened_for(npu, "graph") as backend:
        runner = hal.Runner(hal.load_model(trained, backend), backend)
        x, graph = torch.ones(1 << 20, device="npu"), backend.graph()
        graph.capture(lambda: x * 2)
        assert emulator.live_handles()["graph"] == graphs + 3
    assert emulator.live_handles()["graph"] == graphs
    assert (backend.streams_in_graphs, runner.closed) == (0, True)
    with pytest.raises(ClosedError, match="replay was called on a closed graph"):
        graph.replay()


def test_work_that_failed_is_said_and_all_is_freed(npu: Opened, trained: Path) -> None:
    backend = opened_for(npu, "graph")
    runner, graphs = hal.Runner(hal.load_model(trained, backend), backend), emulator.live_handles()["graph"]
    batch = runner.batch([[5]], [[1]])
    runner.step(batch)
    backend.device.synchronize()
    with emulator.faults.execution("FusedInferAttentionScoreV3"):
        runner.step(batch)
        with pytest.raises(DeviceError, match="507015"):
            backend.close()
    assert runner.closed
    assert emulator.live_handles()["graph"] == graphs - 2
    backend.close()
