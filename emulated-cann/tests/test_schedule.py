"""Tests that a schedule seed reorders only work that is not ordered."""

from __future__ import annotations

import time

import pytest
import torch
from emulated_cann import control, tracing
from helpers.thorough import PROCESSES, thorough
from support.children import ends_well

SEEDS = range(200)
X = torch.arange(1.0, 5.0)


@pytest.fixture(scope="module")
def streams() -> list[torch.npu.Stream]:
    return [torch.npu.Stream() for _ in range(2)]


@pytest.fixture(autouse=True)
def _free_running_afterwards():
    yield
    control.seed(None)
    torch.npu.synchronize()


def two_streams(streams: list[torch.npu.Stream], leave_out: str = "") -> list[float]:
    """Compute x * 2 on one stream, add 1 on another, and sum on the first."""
    first, second = streams
    x, y, z = X.npu(), torch.zeros(4).npu(), torch.zeros(4).npu()
    torch.npu.synchronize()
    with torch.npu.stream(first):
        torch.mul(x, 2, out=y)
        forked = first.record_event()
    with torch.npu.stream(second):
        if leave_out != "fork":
            second.wait_event(forked)
        torch.add(y, 1, out=z)
        joined = second.record_event()
    with torch.npu.stream(first):
        if leave_out != "join":
            first.wait_event(joined)
        torch.add(y, z, out=y)
    first.synchronize()
    result = y.cpu().tolist()
    torch.npu.synchronize()
    return result


RIGHT = (X * 2 + (X * 2 + 1)).tolist()


def test_a_correct_program_is_right_under_every_seed(streams):
    for seed in SEEDS:
        control.seed(seed)
        assert two_streams(streams) == RIGHT, f"seed {seed}"


@pytest.mark.parametrize("leave_out", ["fork", "join"])
def test_a_missing_wait_shows_under_some_seed(streams, leave_out):
    wrong = 0
    for seed in SEEDS:
        control.seed(seed)
        wrong += two_streams(streams, leave_out) != RIGHT
    assert wrong >= 20, f"only {wrong} of {len(SEEDS)} seeds show that the wait is missing"


def order(streams: list[torch.npu.Stream], launches: int = 12) -> list[tuple[str, tuple[int, ...]]]:
    """Return the order in which launches of two streams ran that no event orders."""
    tensors = [torch.zeros(n + 1).npu() for n in range(launches)]
    torch.npu.synchronize()
    with tracing.trace() as trace:
        for n, tensor in enumerate(tensors):
            with torch.npu.stream(streams[n % 2]):
                tensor.add_(1)
    return [(each.name, each.operands[0].shape) for each in trace.ran()]


def test_one_seed_gives_one_order_and_seeds_differ(streams):
    found = []
    for seed in range(40):
        control.seed(seed)
        once = order(streams)
        control.seed(seed)
        assert order(streams) == once, f"seed {seed}"
        found.append(once)
    assert len(set(map(tuple, found))) > 10
    for each in found:  # Each stream stays in order.
        sizes = [shape[0] for _, shape in each]
        assert [n for n in sizes if n % 2] == sorted(n for n in sizes if n % 2)
        assert [n for n in sizes if not n % 2] == sorted(n for n in sizes if not n % 2)


def test_nothing_runs_before_the_host_waits(streams):
    control.seed(0)
    x = torch.zeros(4).npu()
    torch.npu.synchronize()
    with tracing.trace() as trace:
        with torch.npu.stream(streams[0]):
            x.add_(1)
        torch.npu.current_stream()  # needs no device access
        assert trace.ran() == []
    assert len(trace.ran()) == 1


def test_a_host_that_does_not_wait_gets_its_work_after_a_while(streams):
    control.seed(0)
    with tracing.trace() as trace:
        with torch.npu.stream(streams[0]):
            torch.zeros(4).npu().add_(1)
        deadline = time.monotonic() + 30
        while not trace.ran() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert trace.counts() == {"InplaceAdds": 1}


def test_polling_lets_work_go_on(streams):
    for seed in range(10):
        control.seed(seed)
        with torch.npu.stream(streams[0]):
            x = torch.zeros(4).npu().add_(1)
            done = streams[0].record_event()
        deadline = time.monotonic() + 30
        while not done.query():
            assert time.monotonic() < deadline, f"seed {seed}: the event is never reached"
        assert x.cpu().tolist() == [1] * 4


class Update:
    """A captured product whose factor can be updated, guarded by an external event as torch_npu guards attention."""

    def __init__(self, guarded: bool = True) -> None:
        self.x, self.y, self.z = X.npu(), torch.zeros(4).npu(), torch.zeros(4).npu()
        self.event, self.stream = torch.npu.ExternalEvent(), torch.npu.Stream()
        self.graph = torch.npu.NPUGraph()
        with torch.npu.graph(self.graph):
            stream = torch.npu.current_stream()
            if guarded:
                self.event.wait(stream)
                self.event.reset(stream)
            torch.npu.graph_task_group_begin(stream)
            torch.mul(self.x, 1.0, out=self.y)
            self.group = torch.npu.graph_task_group_end(stream)
            torch.add(self.y, 1, out=self.z)

    def update(self, factor: float) -> None:
        with torch.npu.stream(self.stream):
            torch.npu.graph_task_update_begin(self.stream, self.group)
            torch.mul(self.x, factor, out=self.y)
            torch.npu.graph_task_update_end(self.stream)
            self.event.record(self.stream)


def test_update_and_replay_in_either_order():
    for seed in SEEDS:
        if seed % 50 == 0:
            control.seed(None)
            torch.npu.synchronize()
            updated = Update()
        control.seed(seed)
        for step in range(1, 4):
            factor = float(seed + step)
            if (seed + step) % 2:
                updated.graph.replay()
                updated.update(factor)
            else:
                updated.update(factor)
                updated.graph.replay()
            torch.npu.synchronize()
            assert updated.z.cpu().tolist() == (X * factor + 1).tolist(), f"seed {seed}, step {step}"


def test_an_update_behind_its_replay_stands_still_and_is_named():
    """On one stream, the replay waits for work queued behind it. Hardware would hang."""
    updated = Update()
    torch.npu.synchronize()
    held = r"507046[\s\S]*is stalled[\s\S]*Graph\d+, waits[\s\S]*after it: TaskUpdate, ValueWrite"
    with torch.npu.stream(updated.stream):
        updated.graph.replay()
        updated.update(2.0)
        with control.limits(stall=1), pytest.raises(RuntimeError, match=held):
            torch.npu.synchronize()
    updated.event.record(torch.npu.current_stream())
    updated.event.record(torch.npu.default_stream())
    torch.npu.synchronize()


STOPPED = """
import os, subprocess, threading, time, torch, torch_npu
from emulated_cann import control

stream, event = torch.npu.Stream(), torch.npu.ExternalEvent()
recording = torch.npu.Stream()
with torch.npu.stream(stream):
    event.wait(stream)
torch.npu.current_stream().synchronize()

def record():
    time.sleep(8)
    event.record(recording)

thread = threading.Thread(target=record)
thread.start()
subprocess.Popen(["sh", "-c", f"sleep 1; kill -STOP {os.getpid()}; sleep 6; kill -CONT {os.getpid()}"])
with control.limits(stall=3):
    stream.synchronize()
thread.join()
print("well")
"""


@thorough(PROCESSES)
def test_a_process_that_gets_no_core_for_a_while_does_not_stand_still():
    """The process is stopped for longer than a wait may go without progress; the awaited work runs soon after."""
    ends_well("-c", STOPPED)


def test_an_update_that_the_graph_does_not_wait_for_shows():
    wrong = 0
    updated = Update(guarded=False)
    for seed in SEEDS:
        control.seed(seed)
        updated.graph.replay()
        updated.update(float(seed + 2))
        torch.npu.synchronize()
        wrong += updated.z.cpu().tolist() != (X * float(seed + 2) + 1).tolist()
    assert 20 <= wrong < len(SEEDS), f"{wrong} of {len(SEEDS)} seeds replay the old kernel"


def test_branches_of_a_graph_are_reordered_and_joined():
    x = torch.arange(8.0).npu()
    parts = [torch.zeros(8).npu() for _ in range(4)]
    # Streams come from a pool of 32, whose next one may be that of the capture.
    streams = {stream.npu_stream: stream for stream in (torch.npu.Stream() for _ in range(32))}
    main, *side = list(streams.values())[:5]
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, stream=main):
        forked = main.record_event()
        for n, (part, stream) in enumerate(zip(parts, side, strict=True)):
            with torch.npu.stream(stream):
                stream.wait_event(forked)
                torch.mul(x[: n + 1], n + 1, out=part[: n + 1])
            main.wait_event(stream.record_event())
        total = parts[0] + parts[1] + parts[2] + parts[3]
    expected = sum(torch.cat([torch.arange(8.0)[: n + 1] * (n + 1), torch.zeros(7 - n)]) for n in range(4))
    orders = set()
    for seed in range(50):
        control.seed(seed)
        with tracing.trace() as trace:
            graph.replay()
        orders.add(tuple(each.operands[0].shape for each in trace.ran() if each.name == "Muls"))
        torch.testing.assert_close(total.cpu(), expected)
    assert len(orders) > 10
