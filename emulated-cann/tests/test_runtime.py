"""Tests for devices, memory, streams, events, copies and host functions of the emulated CANN, through torch.npu."""

from __future__ import annotations

import ctypes
import gc
import threading
import time

import pytest
import torch
import torch_npu
from emulated_cann import control, tracing
from helpers.thorough import PROCESSES, thorough
from support.children import python


@pytest.fixture
def stream() -> torch.npu.Stream:
    return torch.npu.Stream()


class TestDevices:
    def test_each_device_has_its_own_memory(self):
        for device in range(2):  # torch_npu queries an unused device for the memory of another.
            torch.zeros(1, device=f"npu:{device}")
        before = [torch.npu.mem_get_info(device) for device in range(2)]
        held_here = torch.empty(64 << 20, dtype=torch.uint8, device="npu:1")
        after = [torch.npu.mem_get_info(device) for device in range(2)]
        assert before[0] == after[0]
        assert before[1][0] - after[1][0] >= held_here.nbytes
        assert control.memory_in_use(1) == after[1][1] - after[1][0]

    def test_a_device_that_is_not_there(self):
        with pytest.raises(RuntimeError, match=r"107001|[Ii]nvalid device"):
            torch.npu.set_device(7)
        assert torch.ones(2).npu().sum().item() == 2

    def test_what_the_machine_says_of_itself(self):
        assert torch.npu.device_count() == 2
        assert torch.npu.get_device_name(0).startswith("Ascend910B")
        assert torch.npu.get_device_properties(0).total_memory == torch.npu.mem_get_info(0)[1]
        assert torch.npu.is_bf16_supported()


class TestMemory:
    def test_out_of_memory_is_torchs_own_error(self):
        total = torch.npu.mem_get_info()[1]
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            torch.empty(total + 1, dtype=torch.uint8, device="npu")
        assert torch.ones(3).npu().cpu().tolist() == [1, 1, 1]

    def test_memory_that_was_freed_is_poisoned(self):
        size = 24 << 20
        first = torch.full((size,), 7, dtype=torch.uint8, device="npu")
        torch.npu.synchronize()
        del first
        torch.npu.empty_cache()
        second = torch.empty(size, dtype=torch.uint8, device="npu")
        assert set(second[::4096].cpu().tolist()) == {0xFF}

    @thorough(PROCESSES)
    def test_the_host_cannot_touch_device_memory(self):
        script = (
            "import torch, torch_npu, ctypes\n"
            "x = torch.ones(4).npu(); torch.npu.synchronize()\n"
            "print('ready', flush=True); ctypes.string_at(x.data_ptr(), 4)\n"
        )
        done = python("-c", script)
        assert "ready" in done.stdout, done.stderr
        assert done.returncode == -11

    def test_an_operation_on_freed_memory_is_reported(self):
        x = torch.ones(6 << 20, device="npu")
        stale = torch_npu._C._weak_ref_tensor(x)

        def use() -> None:
            stale.add(1)
            torch.npu.synchronize()

        torch.npu.synchronize()
        del x
        torch.npu.empty_cache()
        with pytest.raises(RuntimeError, match=r"507015[\s\S]*reads \d+ bytes[\s\S]*freed, or never allocated"):
            use()
        assert torch.ones(2).npu().add(1).cpu().tolist() == [2, 2]

    def test_an_operation_on_another_devices_memory_is_reported(self):
        there = torch.ones(4, device="npu:1")
        torch.npu.synchronize(1)
        library = ctypes.CDLL("libascendcl.so")
        stream = ctypes.c_void_p(torch.npu.current_stream(0).npu_stream)
        assert library.aclrtCmoAsync(ctypes.c_void_p(there.data_ptr()), ctypes.c_size_t(16), 0, stream) == 0
        with pytest.raises(RuntimeError, match=r"507015[\s\S]*memory of device 1, but the stream is on device 0"):
            torch.npu.synchronize(0)
        torch.npu.synchronize(0)

    @thorough(PROCESSES)
    def test_expandable_segments(self):
        script = (
            "import torch, torch_npu\n"
            "for round in range(3):\n"
            "    xs = [torch.full((n << 20,), n, dtype=torch.uint8, device='npu') for n in (1, 30, 70, 100)]\n"
            "    assert [int(x[-1]) for x in xs] == [1, 30, 70, 100]\n"
            "    del xs; torch.npu.empty_cache()\n"
            "try: torch.empty(2 << 30, dtype=torch.uint8, device='npu')\n"
            "except torch.OutOfMemoryError: print('no memory')\n"
            "print((torch.ones(3).npu() + 1).cpu().tolist(), torch.npu.memory_reserved() < 64 << 20)\n"
        )
        options = '{"devices": 1, "memory": 1073741824}'
        segments = "expandable_segments:True"
        done = python("-c", script, EMULATED_CANN_OPTIONS=options, PYTORCH_NPU_ALLOC_CONF=segments)
        assert done.stdout.split("\n")[:2] == ["no memory", "[2.0, 2.0, 2.0] True"], done.stderr


class TestStreams:
    def test_work_is_asynchronous(self, stream):
        x = torch.zeros(4).npu()
        torch.npu.synchronize()
        with control.faults.delay("InplaceAdds", seconds=30):
            with torch.npu.stream(stream):
                x.add_(1)
            assert not stream.query()
            assert torch.ones(3).npu().mul(2).cpu().tolist() == [2, 2, 2]  # The other stream continues.
            assert not stream.query()
        stream.synchronize()
        assert x.cpu().tolist() == [1] * 4

    def test_an_event_orders_streams(self, stream):
        x, y = torch.zeros(1 << 16).npu(), torch.zeros(1 << 16).npu()
        for step in range(1, 50):
            x.fill_(step)
            stream.wait_stream(torch.npu.current_stream())
            with torch.npu.stream(stream):
                y.copy_(x)
            torch.npu.current_stream().wait_stream(stream)
        assert y.cpu().unique().tolist() == [49]

    def test_event_times(self, stream):
        start, end = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
        x = torch.ones(256, 256).npu()
        with torch.npu.stream(stream):
            start.record()
            for _ in range(20):
                x = x @ x * 0
            end.record()
        end.synchronize()
        assert start.query()
        assert end.query()
        assert 0 < start.elapsed_time(end) < 10_000

    def test_an_external_event_may_be_waited_for_first(self, stream):
        event, x = torch.npu.ExternalEvent(), torch.zeros(2).npu()
        torch.npu.synchronize()
        for step in (1, 2):
            with torch.npu.stream(stream):
                event.wait(stream)
                event.reset(stream)
                x.add_(1)
            time.sleep(0.02)
            assert not stream.query()
            event.record(torch.npu.current_stream())
            stream.synchronize()
            assert x.cpu().tolist() == [step, step]

    def test_waiting_for_what_never_comes(self, stream):
        event = torch.npu.ExternalEvent()
        with torch.npu.stream(stream):
            event.wait(stream)
        with control.limits(stall=1), pytest.raises(RuntimeError, match=r"507046[\s\S]*is stalled[\s\S]*ValueWait"):
            stream.synchronize()
        event.record(torch.npu.current_stream())
        stream.synchronize()

    def test_a_host_function_runs_in_order(self, stream):
        seen: list[float] = []
        x = torch.zeros(2).npu()
        torch.npu.synchronize()
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: seen.append(time.perf_counter()))
        library = ctypes.CDLL("libascendcl.so")
        with torch.npu.stream(stream):
            x.add_(1)
            handle = ctypes.c_void_p(stream.npu_stream)
        assert library.aclrtLaunchHostFunc(handle, function, None) == 0
        stream.synchronize()
        assert len(seen) == 1

    def test_callbacks_run_on_the_thread_that_subscribed(self, stream):
        seen: list[tuple[int, ...]] = []
        x = torch.zeros(2).npu()
        torch.npu.synchronize()
        torch.npu._subscribe_report(stream)
        try:
            torch.npu._launch_host_func(stream, seen.append, (1,))
            stream.synchronize()
            graph = torch.npu.NPUGraph()
            with torch.npu.graph(graph, stream=stream):
                x.add_(1)
                torch.npu._launch_host_func(stream, seen.append, (2,))
                x.add_(1)
            for _ in range(3):
                graph.replay()
            torch.npu.synchronize()
        finally:
            torch.npu._unsubscribe_report(stream)
        assert seen == [(1,), (2,), (2,), (2,)]
        assert x.cpu().tolist() == [6, 6]

    def test_out_of_streams(self):
        library = ctypes.CDLL("libascendcl.so")
        library.aclGetRecentErrMsg.restype = ctypes.c_char_p
        handle = ctypes.c_void_p()
        with control.limits(streams=1):
            assert library.aclrtCreateStream(ctypes.byref(handle)) == control.OUT_OF_STREAMS
            assert b"no stream left" in library.aclGetRecentErrMsg()
        assert library.aclrtCreateStream(ctypes.byref(handle)) == 0
        assert library.aclrtDestroyStream(handle) == 0
        assert library.aclrtDestroyStream(handle) == 107017
        assert b"is not a live stream" in library.aclGetRecentErrMsg()
        assert library.aclGetRecentErrMsg() is None

    def test_a_stream_that_is_not_done_in_time(self):
        library = ctypes.CDLL("libascendcl.so")
        library.aclGetRecentErrMsg.restype = ctypes.c_char_p
        x = torch.zeros(2).npu()
        torch.npu.synchronize()
        with control.faults.delay(seconds=30):
            x.add_(1)
            stream = ctypes.c_void_p(torch.npu.current_stream().npu_stream)
            assert library.aclrtSynchronizeStreamWithTimeout(stream, 50) == 507046
            assert b"after 50 ms" in library.aclGetRecentErrMsg()
        assert x.cpu().tolist() == [1, 1]


class TestCopies:
    def test_an_unpinned_copy_waits(self, stream):
        x = torch.zeros(4).npu()
        torch.npu.synchronize()
        with control.faults.delay("InplaceAdds", seconds=0.2), torch.npu.stream(stream):
            begin = time.perf_counter()
            x.add_(1)
            x.copy_(torch.ones(4), non_blocking=True)
            stream.query()  # drains torch_npu's queue
            assert time.perf_counter() - begin > 0.15
        assert x.cpu().tolist() == [1] * 4

    def test_a_pinned_copy_does_not(self, stream):
        x, host = torch.zeros(4).npu(), torch.ones(4).pin_memory()
        assert host.is_pinned()
        torch.npu.synchronize()
        with control.faults.delay("InplaceAdds", seconds=30), torch.npu.stream(stream):
            x.add_(1)
            x.copy_(host, non_blocking=True)
            assert not stream.query()
        stream.synchronize()
        assert x.cpu().tolist() == [1] * 4


class TestTrace:
    def test_launches_copies_and_operands(self):
        a, b = torch.ones(2, 3).npu(), torch.ones(3, 4, dtype=torch.float32).npu()
        with tracing.trace() as trace:
            c = a @ b
            c.cpu()
        (mm,) = trace.ran()
        assert mm.name in ("Mm", "Matmul")
        assert [each.shape for each in mm.operands] == [(2, 3), (3, 4), (2, 4)]
        assert [each.dtype for each in mm.operands] == ["float32"] * 3
        assert [each.access for each in mm.operands] == ["read", "read", "write"]
        assert (mm.bytes, mm.flops, mm.phase, mm.device) == (4 * (6 + 12 + 8), 2 * 2 * 3 * 4, "eager", 0)
        assert mm.microseconds > 0
        assert trace.counts("copy") == {"MemcpyDeviceToHost": 1}

    def test_prefetch_is_a_launch(self):
        weight = torch.ones(1024).npu()
        with tracing.trace() as trace:
            torch_npu.npu_prefetch(weight, None, 4096)
        assert trace.counts("prefetch") == {"CmoPrefetch": 1}


def test_no_handle_is_left_behind():
    def work() -> None:
        streams = [torch.npu.Stream() for _ in range(4)]
        x = torch.ones(16).npu()
        for stream in streams:
            with torch.npu.stream(stream):
                y = x + 1
                y.record_stream(stream)
            stream.record_event().synchronize()
        torch.npu.synchronize()

    for _ in range(40):  # Fill torch_npu's pools of streams and events.
        work()
    gc.collect()
    torch.npu.synchronize()
    before = control.live_handles()
    for _ in range(100):
        work()
    gc.collect()
    torch.npu.synchronize()
    after = control.live_handles()
    assert after["event"] <= before["event"] + 8
    assert {k: v for k, v in after.items() if k != "event"} == {k: v for k, v in before.items() if k != "event"}


def test_many_threads_launch_at_once():
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with torch.npu.stream(torch.npu.Stream()):
                x = torch.zeros(64).npu()
                for _ in range(200):
                    x.add_(number)
                assert x.cpu().unique().tolist() == [200 * number]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
