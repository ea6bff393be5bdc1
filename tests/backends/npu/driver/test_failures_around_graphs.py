"""Tests for failures around graphs: unexplained errors, other devices and threads, and interrupts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import emulated_cann
import pytest
import torch
from helpers.attending import LENGTHS
from helpers.npu.attending import Attend
from torch import Tensor

import hal
from hal.errors import DeviceError

Opened = Callable[..., hal.Backend]
SHORT, LONG = LENGTHS[0], LENGTHS[2]


def expected(attend: Attend, lens: list[int]) -> Tensor:
    attend.device_lens.copy_(torch.tensor(lens))
    return attend.twice(torch.tensor(lens, dtype=torch.int32)).cpu()


@pytest.mark.parametrize("seed", [8, 10, 11, 21, 22, 27])
def test_a_failure_that_the_caller_caught_leaves_nothing_behind(npu: Opened, seed: int) -> None:
    """With these schedules an event's flag stays set, and a replay could read the previous one's lengths."""
    attend = Attend(npu())
    graph = attend.backend.graph()
    output, wanted = graph.capture(attend.twice), expected(attend, LONG)
    graph.replay(**attend.host_values(SHORT))
    output.cpu()
    with emulated_cann.schedule(seed):
        with emulated_cann.faults.execution("FusedInferAttentionScoreV3"):
            graph.replay(**attend.host_values(LENGTHS[1]))
            with pytest.raises(RuntimeError, match="507015"):
                torch.npu.synchronize()  # without hal
        for _ in range(3):
            graph.replay(**attend.host_values(LONG))
            torch.testing.assert_close(output.cpu(), wanted, rtol=0, atol=0)


def test_graphs_of_two_devices_and_another_thread(npu: Opened) -> None:
    for device in (0, 1, 0):
        attend = Attend(npu(options={"device": device}))
        assert torch.npu.current_device() == device
        graph = attend.backend.graph()
        output, wanted, found = graph.capture(attend.twice), expected(attend, LONG), []
        assert output.device.index == device
        torch.npu.synchronize(device)

        def replay(
            graph: hal.vendor.Graph = graph,
            attend: Attend = attend,
            output: Tensor = output,
            found: list[Tensor] = found,
        ) -> None:
            graph.replay(**attend.host_values(LONG))  # A new thread starts on device 0.
            found.append(output.cpu())

        thread = threading.Thread(target=replay)
        thread.start()
        thread.join()
        torch.testing.assert_close(found[0], wanted, rtol=0, atol=0)


def test_every_thread_that_lost_work_is_told(npu: Opened) -> None:
    """Each thread is told once, and threads that lost no work are not told. Later launches run."""
    npu()
    x, y, z = (torch.zeros(4).npu() for _ in range(3))
    torch.npu.synchronize()
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second, emulated_cann.faults.execution():
        first.submit(x.add_, 1).result()
        second.submit(y.add_, 1).result()
        for thread in (second, first):
            with pytest.raises(RuntimeError, match="507015"):
                thread.submit(torch.npu.synchronize).result()
            thread.submit(torch.npu.synchronize).result()
        torch.npu.synchronize()
        second.submit(z.add_, 1).result()
    assert [each.cpu().tolist() for each in (y, z)] == [[0] * 4, [1] * 4]


def test_a_replay_tells_what_its_thread_lost(npu: Opened) -> None:
    """A thread that has not waited for its own failure recovers from one that another thread was told of."""
    attend = Attend(npu())
    graph = attend.backend.graph()
    output, wanted = graph.capture(attend.twice), expected(attend, LONG)
    x, y = (torch.zeros(4).npu() for _ in range(2))
    torch.npu.synchronize()
    with ThreadPoolExecutor(1) as other, emulated_cann.faults.execution():
        x.add_(1)
        other.submit(y.add_, 1).result()
        with pytest.raises(DeviceError):
            other.submit(attend.backend.device.synchronize).result()
        with pytest.raises(DeviceError, match="507015"):
            graph.replay(**attend.host_values(LONG))
    graph.replay(**attend.host_values(LONG))
    torch.testing.assert_close(output.cpu(), wanted, rtol=0, atol=0)


def test_activation_makes_the_device_current(npu: Opened) -> None:
    first, second = npu(), npu(options={"device": 1})
    for backend, device in ((first, 0), (second, 1)):
        backend.activate()
        assert torch.npu.current_device() == device
