"""Tests for captures and replays of the emulated CANN: refusals with their error codes, and correct results."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import threading
from unittest.mock import ANY

import pytest
import torch
import torch_npu
from emulated_cann import control, tracing
from helpers.thorough import PROCESSES, thorough
from support.children import ends_well

ACL = ctypes.CDLL("libascendcl.so")
ACL.aclGetRecentErrMsg.restype = ctypes.c_char_p
MODES = {"global": 0, "thread_local": 1, "relaxed": 2}


def capture(body, **options):
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, **options):
        result = body()
    return graph, result


def replay_and_wait(graph: torch.npu.NPUGraph) -> None:
    graph.replay()
    torch.npu.synchronize()


def healthy() -> bool:
    """Check that the process can still compute, capture and replay."""
    x = torch.ones(4).npu()
    graph, y = capture(lambda: x + 1)
    x.fill_(2)
    graph.replay()
    return y.cpu().tolist() == [3] * 4


class Raw:
    """A stream captured through CANN's own interface, with access to every return code."""

    def __init__(self, mode: str = "global") -> None:
        self.stream, self.x = torch.npu.Stream(), torch.zeros(4).npu()
        torch.npu.synchronize()
        self.handle = ctypes.c_void_p(self.stream.npu_stream)
        assert ACL.aclmdlRICaptureBegin(self.handle, MODES[mode]) == 0

    def launch(self, stream: torch.npu.Stream | None = None) -> int:
        handle = ctypes.c_void_p((stream or self.stream).npu_stream)
        return ACL.aclrtMemsetAsync(ctypes.c_void_p(self.x.data_ptr()), 16, 0, 16, handle)

    def status(self) -> int:
        status, graph = ctypes.c_int(), ctypes.c_void_p()
        assert ACL.aclmdlRICaptureGetInfo(self.handle, ctypes.byref(status), ctypes.byref(graph)) == 0
        return status.value

    def end(self, stream: torch.npu.Stream | None = None) -> int:
        self.graph = ctypes.c_void_p()
        handle = ctypes.c_void_p((stream or self.stream).npu_stream)
        return ACL.aclmdlRICaptureEnd(handle, ctypes.byref(self.graph))


def reason() -> str:
    return (ACL.aclGetRecentErrMsg() or b"").decode()


REFUSED = {
    "item": (lambda x: x.sum().item(), 107027),
    "cpu": (lambda x: x.cpu(), 107030),
    "nonzero": (lambda x: x.nonzero(), 107027),
    "stream synchronize": (lambda x: torch.npu.current_stream().synchronize(), 107027),
    "stream query": (lambda x: torch.npu.current_stream().query(), 107027),
    "device synchronize": (lambda x: torch.npu.synchronize(), 107027),
    "blocking copy": (lambda x: x.copy_(torch.ones(4)), 107030),
}


class TestRefusals:
    @pytest.mark.parametrize("what", REFUSED)
    def test_a_call_that_is_refused_leaves_the_capture_as_it_was(self, what):
        body, code = REFUSED[what]
        x, y = torch.ones(4).npu(), torch.zeros(4).npu()
        torch.npu.synchronize()
        before, graph = control.live_handles()["graph"], torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            torch.add(x, 1, out=y)
            with pytest.raises(RuntimeError, match=str(code)):
                body(x)
            y.mul_(3)
        graph.replay()
        assert y.cpu().tolist() == [6] * 4
        graph.reset()
        assert control.live_handles()["graph"] == before

    @thorough(PROCESSES)
    def test_what_torch_npus_queue_would_not_survive(self):
        # An error stops torch_npu's queue thread for good, as on hardware; without the queue the process continues.
        script = """
import torch, torch_npu
from emulated_cann import control
x = torch.ones(4).npu()
def capture(body):
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        body()
    return graph
def failure(body):
    try: body()
    except RuntimeError as error: return f"{error}{error.__context__}"
assert "107000" in failure(lambda: capture(lambda: x.copy_(torch.ones(4), non_blocking=True)))
assert (x + 1).cpu().tolist() == [2] * 4
outside = torch.npu.default_stream()
assert "107024" in failure(lambda: capture(lambda: torch.npu.current_stream().wait_stream(outside)))
assert (x + 1).cpu().tolist() == [2] * 4
with control.faults.launch("Adds") as fault:
    assert "507000" in failure(lambda: x + 1)
assert fault.struck == 1
assert (x + 1).cpu().tolist() == [2] * 4
with control.faults.launch("Adds"):
    assert "507000" in failure(lambda: capture(lambda: x + 1))
capture(lambda: x.add_(1)).replay()
assert x.cpu().tolist() == [2] * 4
print("well")
"""
        ends_well("-c", script, TASK_QUEUE_ENABLE="0")

    def test_the_end_of_a_capture_in_which_waits_were_refused(self):
        raw, event = Raw(), ctypes.c_void_p()
        assert ACL.aclrtCreateEventExWithFlag(ctypes.byref(event), 1) == 0
        assert ACL.aclrtRecordEvent(event, raw.handle) == 0
        host = (ctypes.c_char * 16)()
        device = ctypes.c_void_p(raw.x.data_ptr())
        assert ACL.aclrtSynchronizeStream(raw.handle) == 107027
        assert "is captured" in reason()
        assert ACL.aclrtStreamQuery(raw.handle, ctypes.byref(ctypes.c_int())) == 107027
        assert ACL.aclrtSynchronizeDevice() == 107027
        assert ACL.aclrtSynchronizeEvent(event) == 107028
        assert ACL.aclrtMemcpy(host, 16, device, 16, 2) == 107030
        assert ACL.aclrtMemcpyAsync(host, 16, device, 16, 2, raw.handle) == 107000
        assert ACL.aclrtDestroyStream(raw.handle) == 107027
        assert raw.status() == 1
        assert raw.launch() == 0
        assert raw.end() == 0
        assert raw.graph.value
        assert ACL.aclmdlRIExecuteAsync(raw.graph, raw.handle) == 0
        assert ACL.aclrtSynchronizeStream(raw.handle) == 0
        assert ACL.aclmdlRIDestroy(raw.graph) == 0

    def test_the_end_of_an_invalid_capture(self):
        x = torch.ones(4).npu()
        torch.npu.synchronize()
        with control.limits(tasks=control.live_handles()["task"] + 1):
            raw = Raw()
            assert [raw.launch() for _ in range(3)] == [0, 207008, 0]  # Work behind it is dropped.
            assert raw.status() == 2
            assert raw.end() == 507903
            assert "207008" in reason()
            assert not raw.graph.value
            assert raw.status() == 0
        assert (x + 1).cpu().tolist() == [2] * 4

    def test_a_copy_that_waits_beside_a_capture(self):
        raw, side = Raw(), torch.npu.Stream()
        host = (ctypes.c_char * 16)()
        copy = (host, 16, ctypes.c_void_p(raw.x.data_ptr()), 16, 2, ctypes.c_void_p(side.npu_stream))
        assert ACL.aclrtMemcpyAsync(*copy) == 107041
        assert raw.end() == 0
        assert ACL.aclrtMemcpyAsync(*copy) == 0

    @pytest.mark.parametrize(
        ("mode", "elsewhere", "code"),
        [
            ("global", False, 107030),
            ("global", True, 107030),
            ("thread_local", False, 107030),
            ("thread_local", True, 0),
            ("relaxed", False, 0),
            ("relaxed", True, 0),
        ],
    )
    def test_an_unsafe_call(self, mode, elsewhere, code):
        raw = Raw(mode)
        host = (ctypes.c_char * 16)()
        codes: list[int] = []

        def unsafe() -> None:
            codes.append(ACL.aclrtMemcpy(host, 16, ctypes.c_void_p(raw.x.data_ptr()), 16, 2))

        if elsewhere:
            thread = threading.Thread(target=unsafe)
            thread.start()
            thread.join()
        else:
            unsafe()
        assert codes == [code]
        assert raw.end() == 0
        assert healthy()

    def test_a_thread_may_relax_its_own_mode(self):
        raw = Raw()
        mode = ctypes.c_int(2)
        assert ACL.aclmdlRICaptureThreadExchangeMode(ctypes.byref(mode)) == 0
        assert mode.value == 0
        assert ACL.aclrtMemset(ctypes.c_void_p(raw.x.data_ptr()), 16, 0, 16) == 0
        assert ACL.aclmdlRICaptureThreadExchangeMode(ctypes.byref(mode)) == 0
        assert raw.end() == 0

    def test_allocating_is_allowed(self):
        raw = Raw()
        address = ctypes.c_void_p()
        assert ACL.aclrtMalloc(ctypes.byref(address), ctypes.c_size_t(64), 0) == 0
        assert ACL.aclrtFree(address) == 0
        assert raw.end() == 0

    def test_an_end_on_the_wrong_stream(self):
        raw, side = Raw(), torch.npu.Stream()
        assert raw.end(side) == 107029
        self.fork(raw, side)
        assert raw.end(side) == 107036
        assert "cannot end on stream" in reason()
        assert raw.end() == 0
        assert healthy()

    def test_an_end_on_the_wrong_thread(self):
        for mode, code in (("global", 107038), ("thread_local", 107038), ("relaxed", 0)):
            raw, codes = Raw(mode), []
            thread = threading.Thread(target=lambda raw=raw, codes=codes: codes.append(raw.end()))
            thread.start()
            thread.join()
            assert codes == [code]
            if code:
                assert not raw.graph.value
                assert raw.status() == 0
                assert raw.end() == 107029
        assert healthy()

    def test_an_unjoined_stream(self):
        raw, side = Raw(), torch.npu.Stream()
        event = self.fork(raw, side)
        assert raw.launch(side) == 0
        assert ACL.aclrtRecordEvent(event, ctypes.c_void_p(side.npu_stream)) == 0  # recorded, but nothing waits for it
        assert raw.end() == 107025
        assert "does not wait for" in reason()
        assert not raw.graph.value
        assert side.query()  # both streams are idle again
        assert healthy()

    def test_a_joined_stream(self):
        raw, side = Raw(), torch.npu.Stream()
        event = self.fork(raw, side)
        assert raw.launch(side) == 0
        assert ACL.aclrtRecordEvent(event, ctypes.c_void_p(side.npu_stream)) == 0
        assert ACL.aclrtQueryEventStatus(event, ctypes.byref(ctypes.c_int())) == 107028
        assert ACL.aclrtStreamWaitEvent(raw.handle, event) == 0
        assert raw.status() == 1
        assert raw.end() == 0
        assert healthy()

    def fork(self, raw: Raw, side: torch.npu.Stream) -> ctypes.c_void_p:
        event = ctypes.c_void_p()
        assert ACL.aclrtCreateEventExWithFlag(ctypes.byref(event), 1) == 0
        assert ACL.aclrtRecordEvent(event, raw.handle) == 0
        assert ACL.aclrtStreamWaitEvent(ctypes.c_void_p(side.npu_stream), event) == 0
        return event

    def test_broken_task_groups(self):
        group = ctypes.c_void_p()
        raw = Raw()
        assert ACL.aclmdlRICaptureTaskGrpEnd(raw.handle, ctypes.byref(group)) == 107033
        assert raw.end() == 0
        raw = Raw()
        assert ACL.aclmdlRICaptureTaskGrpBegin(raw.handle) == 0
        assert ACL.aclmdlRICaptureTaskGrpBegin(raw.handle) == 107033
        assert ACL.aclmdlRICaptureTaskGrpEnd(raw.handle, ctypes.byref(group)) == 0
        assert raw.end() == 0
        raw = Raw()
        assert ACL.aclmdlRICaptureTaskGrpBegin(raw.handle) == 0
        assert raw.launch() == 507009  # A fill is not a kernel.
        assert ACL.aclmdlRICaptureTaskGrpEnd(raw.handle, ctypes.byref(group)) == 507903
        assert raw.end() == 507903
        raw = Raw()
        assert ACL.aclmdlRICaptureTaskGrpBegin(raw.handle) == 0
        assert raw.end() == 107033
        raw, side = Raw(), torch.npu.Stream()
        self.fork(raw, side)
        assert ACL.aclmdlRICaptureTaskGrpBegin(raw.handle) == 0
        assert raw.launch(side) == 107034  # The task group belongs to the other stream.
        assert raw.end() == 507903
        stream = torch.npu.Stream()
        assert ACL.aclmdlRICaptureTaskGrpBegin(ctypes.c_void_p(stream.npu_stream)) == 107029
        assert healthy()

    def test_an_update_must_issue_the_same_kernels(self):
        x, y, stream = torch.ones(4).npu(), torch.zeros(4).npu(), torch.npu.Stream()
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            torch.npu.graph_task_group_begin(torch.npu.current_stream())
            torch.mul(x, 2, out=y)
            group = torch.npu.graph_task_group_end(torch.npu.current_stream())
        with torch.npu.stream(stream):
            torch.npu.graph_task_update_begin(stream, group)
            torch.add(x, 2, out=y)
            with pytest.raises(RuntimeError, match=r"107040[\s\S]*\[Muls\], but launched \[Adds\]"):
                torch.npu.graph_task_update_end(stream)
        graph.replay()
        assert y.cpu().tolist() == [2] * 4

    @thorough(PROCESSES)
    def test_an_update_that_is_refused_leaves_room_for_the_next(self):
        script = """
import torch, torch_npu
q, kv = torch.ones(2, 1, 64).half().npu(), torch.arange(32.0).half().reshape(2, 16, 1).expand(2, 16, 64).contiguous()
kv, graph = kv.npu() / 32, torch.npu.NPUGraph()
with torch.npu.graph(graph, auto_dispatch_capture=True):
    out = torch_npu.npu_fused_infer_attention_score(
        q, kv, kv, num_heads=1, input_layout="BSH", scale=0.1, actual_seq_lengths_kv=[1, 1])[0]
def update(*lengths):
    graph.update(cpu_update_input=[{"actual_seq_lengths_kv": list(lengths)}])
def result():
    torch.npu.synchronize()
    return out.float().sum().item()
results = {}
for lengths in ((4, 5), (7, 3)):
    graph.replay()
    update(*lengths)
    results[lengths] = result()
assert results[4, 5] != results[7, 3]
graph.replay()
for _ in range(2):
    try: update(4, 99)
    except RuntimeError as error: assert "161002" in str(error) and "99" in str(error), error
    else: raise AssertionError("99 of 16 was taken")
update(4, 5)  # which is what the replay waits for
assert result() == results[4, 5]
update(7, 3)
graph.replay()
assert result() == results[7, 3]
stream = graph.graph_dispatch_mode.update_stream
group = graph.graph_dispatch_mode.graph_dispatch_records[0].handle
torch.npu.graph_task_update_begin(stream, group)
for _ in range(2):
    try: torch.npu.graph_task_update_begin(stream, group)  # nothing failed since: this is the caller's mistake
    except RuntimeError as error: assert "107033" in str(error), error
    else: raise AssertionError("two updates at once were taken")
print("well")
"""
        ends_well("-c", script, TASK_QUEUE_ENABLE="0")

    def test_out_of_streams_and_tasks(self):
        x = torch.ones(4).npu()
        torch.npu.synchronize()
        in_use = control.live_handles()
        with control.limits(streams=1), pytest.raises(RuntimeError, match="207008"):  # device 0 already has more
            capture(lambda: x + 1)
        with control.limits(tasks=in_use["task"] + 5):
            raw = Raw()
            codes = [raw.launch() for _ in range(7)]
            assert codes == [0] * 5 + [207008, 0]
            assert raw.end() == 507903
        assert healthy()

    def test_a_graph_that_is_gone(self):
        graph, _ = capture(lambda: torch.ones(2, device="npu"))
        graph.reset()
        with pytest.raises(RuntimeError, match="without a preceding successful capture"):
            graph.replay()
        raw = Raw()
        assert raw.end() == 0
        assert ACL.aclmdlRIDestroy(raw.graph) == 0
        assert ACL.aclmdlRIExecuteAsync(raw.graph, raw.handle) == 107017
        assert "is not a live graph" in reason()


class TestReplays:
    def test_a_replay_is_asynchronous_and_runs_anywhere(self):
        x, side = torch.zeros(4).npu(), torch.npu.Stream()
        graph, _ = capture(lambda: x.add_(1))
        torch.npu.synchronize()
        with control.faults.delay(seconds=30):
            with torch.npu.stream(side):
                graph.replay()
            assert not side.query()
        side.synchronize()
        graph.replay()
        torch.npu.synchronize()
        assert x.cpu().tolist() == [2] * 4

    def test_replays_of_one_graph_do_not_overlap(self):
        x, sides = torch.zeros(4).npu(), [torch.npu.Stream() for _ in range(3)]
        graph, _ = capture(lambda: [x.add_(1) for _ in range(20)])
        torch.npu.synchronize()
        for turn in range(60):
            with torch.npu.stream(sides[turn % 3]):
                graph.replay()
        torch.npu.synchronize()
        assert x.cpu().tolist() == [1200] * 4

    def test_fork_and_join_of_8_streams(self):
        x, sides = torch.zeros(8, 16).npu(), [torch.npu.Stream() for _ in range(8)]

        def body() -> torch.Tensor:
            main = torch.npu.current_stream()
            y = x * 2
            for row, side in enumerate(sides):
                side.wait_stream(main)
                with torch.npu.stream(side):
                    for _ in range(3):
                        y[row].add_(row)
            for side in sides:
                main.wait_stream(side)
            return y.sum(1)

        graph, total = capture(body)
        handles = control.live_handles()
        for step in range(20):
            x.fill_(step)
            graph.replay()
            assert total.cpu().tolist() == [16 * (2 * step + 3 * row) for row in range(8)]
        with tracing.trace() as trace:
            graph.replay()
        assert trace.counts()["InplaceAdds"] == 24
        assert trace.counts("graph").total() == 1
        assert {each.phase for each in trace.ran()} == {"replay"}
        assert control.live_handles() == handles

    def test_a_pinned_copy_inside(self):
        host, x = torch.zeros(4).pin_memory(), torch.zeros(4).npu()
        graph, y = capture(lambda: x.copy_(host, non_blocking=True) + 1)
        host.fill_(5)
        graph.replay()
        assert y.cpu().tolist() == [6] * 4

    def test_a_branch_that_a_tensor_decides(self):
        x, choice = torch.zeros(4).npu(), torch.tensor(True).npu()
        graph = torch.npu.NPUGraph()
        if not hasattr(graph, "begin_capture_to_if_node"):
            pytest.skip("this version of torch_npu has no conditional nodes")
        with torch.npu.graph(graph):
            x.add_(1)
            graph.begin_capture_to_if_node(choice)
            x.add_(10)
            graph.end_capture_to_conditional_node()
            x.add_(100)
        for value, expected in ((True, 111), (False, 101), (True, 111)):
            x.zero_()
            choice.fill_(value)
            graph.replay()
            assert x.cpu().tolist() == [expected] * 4

    def test_a_graph_on_memory_that_was_freed(self):
        x = torch.ones(6 << 20, device="npu")
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            x.add_(1)
        del x
        torch.npu.empty_cache()
        with pytest.raises(RuntimeError, match=r"507015[\s\S]*freed, or never allocated"):
            replay_and_wait(graph)
        assert healthy()

    def test_a_dump(self, tmp_path):
        x, side = torch.ones(4).npu(), torch.npu.Stream()
        if side == torch.npu.graph.default_capture_stream:  # The pool of streams begins again after its last one.
            side = torch.npu.Stream()

        def body():
            y = x + 1
            side.wait_stream(torch.npu.current_stream())
            with torch.npu.stream(side):
                z = y * 2
            torch.npu.current_stream().wait_stream(side)
            return z - 1

        graph, _ = capture(body)
        graph.debug_dump(str(tmp_path / "graph.json"))
        dumped = json.loads((tmp_path / "graph.json").read_text())
        assert {each["pid"] for each in dumped} == {f"{os.getpid()} aclGraph"}
        assert len({each["args"]["Model Id"] for each in dumped}) == 1
        lanes: dict[str, list[str]] = {}
        for each in dumped:
            lanes.setdefault(each["tid"], []).append(each["name"])
        assert lanes == {
            "stream0": ["Adds", "EVENT_RECORD_0", "EVENT_WAIT_1", "Subs"],
            "stream1": ["EVENT_WAIT_0", "Muls", "EVENT_RECORD_1"],
        }
        assert dumped[0]["args"] == {"Model Id": ANY, "Stream Id": 0, "Task Id": 0, "Task Type": "KERNEL_AICORE"}
        # torch_npu reports these timestamps, where both sides of an event have the same time.
        aligned = json.loads((tmp_path / "graph.aligned.json").read_text())
        times = {each["name"]: each for each in aligned if each["ph"] == "X"}
        assert times["Muls"]["ts"] > times["EVENT_RECORD_0"]["ts"] > times["Adds"]["ts"]
        assert times["Subs"]["ts"] > times["EVENT_RECORD_1"]["ts"]
        assert {each["name"] for each in aligned if each["ph"] == "s"} == {"PAIR_0", "PAIR_1"}

    def test_torch_accelerator_graph(self):
        x = torch.ones(4).npu()
        graph = torch.accelerator.Graph()
        with torch.npu.stream(torch.npu.Stream()), graph:
            y = x + 1
        x.fill_(4)
        graph.replay()
        assert y.cpu().tolist() == [5] * 4

    def test_make_graphed_callables(self):
        layer = torch.nn.Linear(4, 4).npu()
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(0)).npu()
        with torch.no_grad():
            expected = layer(x).cpu()
            graphed = torch.npu.make_graphed_callables(layer.requires_grad_(False), (torch.zeros_like(x),))
            torch.testing.assert_close(graphed(x).cpu(), expected)


def test_a_thousand_captures_and_ten_thousand_replays_leak_nothing():
    x = torch.zeros(16).npu()
    pool = torch.npu.graph_pool_handle()

    def work(captures: int, replays: int) -> None:
        for _ in range(captures):
            graph, _ = capture(lambda: (x + 1) * 2, pool=pool)
            for _ in range(replays):
                graph.replay()
        gc.collect()
        torch.npu.synchronize()  # torch_npu's queue destroys events.

    work(50, 10)
    before, memory = control.live_handles(), resident()
    work(1000, 10)
    assert not grown(before)
    assert resident() - memory < 16 << 20


def test_what_captures_can_hold_leaks_no_handles():
    x, y, pool = torch.ones(16).npu(), torch.zeros(16).npu(), torch.npu.graph_pool_handle()
    side, update = torch.npu.Stream(), torch.npu.Stream()

    def once(factor: float) -> None:
        event, graph = torch.npu.ExternalEvent(), torch.npu.NPUGraph()
        with torch.npu.graph(graph, pool=pool):
            main = torch.npu.current_stream()
            event.wait(main)
            event.reset(main)
            torch.npu.graph_task_group_begin(main)
            torch.mul(x, 1.0, out=y)
            group = torch.npu.graph_task_group_end(main)
            side.wait_stream(main)
            with torch.npu.stream(side):
                z = y + 1
            main.wait_stream(side)
        graph.replay()
        with torch.npu.stream(update):
            torch.npu.graph_task_update_begin(update, group)
            torch.mul(x, factor, out=y)
            torch.npu.graph_task_update_end(update)
            event.record(update)
        torch.npu.synchronize()
        assert z.cpu().tolist() == [factor + 1] * 16

    def work(count: int) -> None:
        for n in range(count):
            once(float(n % 7 + 2))
        gc.collect()
        torch.npu.synchronize()

    work(20)
    before, memory = control.live_handles(), resident()
    work(100)
    growth = grown(before)
    # torch_npu never frees the memory word of an ExternalEvent, even of one that was dropped at once.
    assert growth.pop("allocation") <= 100
    assert not growth
    assert resident() - memory < 16 << 20


def grown(before: dict[str, int]) -> dict[str, int]:
    """Return the growth of each kind of handle that grew. Handles of earlier tests may be freed meanwhile."""
    return {kind: count - before[kind] for kind, count in control.live_handles().items() if count > before[kind]}


def resident() -> int:
    """Return this process's resident memory in bytes."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


assert torch_npu.__version__  # The tests access it through torch.npu.
