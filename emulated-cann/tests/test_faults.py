"""Tests for fault injection: each fault is raised as torch_npu's own exception, in time, and the next call works."""

from __future__ import annotations

import ctypes
import time

import pytest
import torch
from emulated_cann import control, tracing
from emulated_cann.errors import EmulationError
from helpers.thorough import PROCESSES, thorough
from support.children import ends_well


@pytest.fixture(autouse=True)
def _healthy_afterwards():
    yield
    x = torch.arange(4.0).npu()
    assert (x * 2 + 1).cpu().tolist() == [1, 3, 5, 7]
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        y = x * 3
    graph.replay()
    assert y.cpu().tolist() == [0, 3, 6, 9]


@pytest.fixture
def x() -> torch.Tensor:
    result = torch.ones(4).npu()
    torch.npu.synchronize()
    return result


class TestAllocations:
    def test_none_is_left(self):
        torch.npu.empty_cache()
        with control.faults.allocation() as fault, pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            torch.empty(64 << 20, dtype=torch.uint8, device="npu")
        assert fault.struck > 0

    def test_torch_npu_frees_its_cache_and_tries_again(self):
        cached = torch.empty(64 << 20, dtype=torch.uint8, device="npu")
        del cached
        with control.faults.allocation(count=1) as fault:
            torch.empty(128 << 20, dtype=torch.uint8, device="npu")
        assert fault.struck == 1

    @pytest.mark.parametrize("first", [1, 2, 3])
    def test_the_nth(self, first):
        torch.npu.empty_cache()
        with control.faults.allocation(first=first):
            made = [torch.empty(32 << 20, dtype=torch.uint8, device="npu") for _ in range(first - 1)]
            with pytest.raises(torch.OutOfMemoryError):
                torch.empty(32 << 20, dtype=torch.uint8, device="npu")
        assert len(made) == first - 1


class TestKernels:
    @pytest.mark.parametrize("code", [507015, 507035, 507011])
    def test_one_that_fails_while_it_runs(self, x, code):
        with control.faults.execution("Adds", code=code) as fault:
            y = x + 1
            with pytest.raises(RuntimeError, match=f"{code}[\\s\\S]*Adds: fault injected by emulated_cann.faults"):
                torch.npu.synchronize()
        assert fault.struck == 1
        assert y.shape == (4,)

    def test_the_nth_of_its_name(self, x):
        with control.faults.execution("Adds", first=3) as fault, tracing.trace() as trace:
            for _ in range(5):
                x.mul(2)
                x.add(1)
            with pytest.raises(RuntimeError, match="507015"):
                torch.npu.synchronize()
        assert fault.struck == 1
        assert trace.counts() == {"Muls": 3, "Adds": 2}  # torch_npu makes its streams stop at a failure.

    def test_a_failure_is_reported_where_its_stream_is_waited_for(self, x):
        side = torch.npu.Stream()
        with control.faults.execution("Adds"):
            with torch.npu.stream(side):
                x.add(1)
            torch.npu.default_stream().synchronize()
            with pytest.raises(RuntimeError, match="507015"):
                side.synchronize()
        side.synchronize()  # first time

    def test_a_failure_shows_at_an_event_too(self, x):
        with control.faults.execution("Adds"):
            x.add(1)
            event = torch.npu.current_stream().record_event()
            with pytest.raises(RuntimeError, match="507015"):
                event.synchronize()
        torch.npu.synchronize()  # first time

    @pytest.mark.parametrize("seed", [None, 0, 1])
    @pytest.mark.parametrize("late", [False, True], ids=["waiting already", "waiting afterwards"])
    def test_a_stream_that_waits_for_one_that_failed_has_failed(self, x, seed, late):
        side, stale = torch.npu.Stream(), torch.full((4,), 5.0).npu()
        torch.npu.synchronize()
        control.seed(seed)
        try:
            with control.faults.execution("Adds"):
                with torch.npu.stream(side):
                    torch.add(x, 1, out=stale)
                done = side.record_event()
                if late:
                    deadline = time.monotonic() + 30
                    while not done.query():
                        assert time.monotonic() < deadline
                torch.npu.current_stream().wait_event(done)
                product = stale * 2
                with pytest.raises(RuntimeError, match="507015"):
                    torch.npu.current_stream().synchronize()
            side.synchronize()  # first time
            torch.npu.current_stream().wait_event(done)  # The host has seen the failure, so this succeeds.
            assert (x + 1).cpu().tolist() == [2] * 4
            with torch.npu.stream(side):
                assert (x + 2).cpu().tolist() == [3] * 4
        finally:
            control.seed(None)
        assert product.shape == (4,)

    def test_an_event_that_told_the_host_leaves_its_stream_well(self, x):
        with control.faults.execution("Adds"):
            x.add(1)
            with pytest.raises(RuntimeError, match="507015"):
                torch.npu.current_stream().record_event().synchronize()
        assert (x * 3).cpu().tolist() == [3] * 4

    def test_one_that_fails_in_a_replay(self, x):
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            y = x + 1
            z = y * 2
        with control.faults.execution("Adds"), tracing.trace() as trace:
            graph.replay()
            with pytest.raises(RuntimeError, match=r"507015[\s\S]*Adds"):
                torch.npu.synchronize()
        assert trace.counts() == {}  # Work behind the failure is skipped.
        graph.replay()
        assert z.cpu().tolist() == [4] * 4

    @pytest.mark.parametrize("seed", [None, 0, 1])
    def test_one_that_hangs(self, x, seed):
        control.seed(seed)
        begin = time.perf_counter()
        try:
            with control.faults.hang("Adds", seconds=0.3):
                x.add(1)
                with pytest.raises(RuntimeError, match=r"507014[\s\S]*time limit"):
                    torch.npu.synchronize()
        finally:
            control.seed(None)
        assert 0.25 < time.perf_counter() - begin < 5

    def test_one_that_hangs_ends_at_the_limit_of_execution(self, x):
        runtime = ctypes.CDLL("libascendcl.so")
        begin = time.perf_counter()
        actual = ctypes.c_uint64()
        assert runtime.aclrtSetOpExecuteTimeOutV2(ctypes.c_uint64(200_000), ctypes.byref(actual)) == 0
        try:
            with control.faults.hang("Adds", seconds=60):
                x.add(1)
                with pytest.raises(RuntimeError, match="507014"):
                    torch.npu.synchronize()
        finally:
            assert runtime.aclrtSetOpExecuteTimeOut(0) == 0
        assert actual.value == 200_000
        assert 0.15 < time.perf_counter() - begin < 5

    def test_a_copy_that_fails(self, x):
        with control.faults.copy(code=507013), pytest.raises(RuntimeError, match="507013"):
            x.cpu()
        torch.npu.synchronize()


@thorough(PROCESSES)
@pytest.mark.parametrize("queue", ["1", "2"])
def test_what_torch_npus_queue_drops_is_not_read_in_silence(queue):
    script = """
import torch, torch_npu
from emulated_cann import control
x = torch.ones(4).npu()
torch.npu.synchronize()
side = torch.npu.Stream()
with control.faults.launch("Adds") as fault:
    try: (x + 1).cpu()
    except RuntimeError as error: assert "Adds" in str(error), error
    else: raise AssertionError("the refusal itself is lost")
assert fault.struck == 1
def dropped():
    return x * 3
for wait in (lambda: dropped().cpu(), torch.npu.synchronize, side.query, side.synchronize, lambda: dropped().tolist()):
    try: found = wait()
    except RuntimeError as error:
        assert "task queue stopped" in str(error) and "launching Adds" in str(error), error
        assert "TASK_QUEUE_ENABLE=0" in str(error), error
    else: raise AssertionError(f"{found} was read")
print("well")
"""
    ends_well("-c", script, TASK_QUEUE_ENABLE=queue)


def test_no_stream_left_for_a_capture(x):
    graph = torch.npu.NPUGraph()
    with control.faults.streams(), pytest.raises(RuntimeError, match="207008"), torch.npu.graph(graph):
        x.add(1)


class TestControl:
    def test_how_often_is_known_afterwards(self):
        with (
            control.faults.execution("Nothing") as fault,
            pytest.raises(EmulationError, match="only after the fault"),
        ):
            _ = fault.struck
        assert fault.struck == 0

    @pytest.mark.parametrize("wrong", [{"first": 0}, {"count": 0}, {"first": -1}])
    def test_occasions_are_counted_from_1(self, wrong):
        with pytest.raises(ValueError, match="must be at least 1"), control.faults.execution(**wrong):
            pass
