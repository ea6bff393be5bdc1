"""Tests for threads with one runner each on one NPU: no deadlocks, and no thread gets another's lengths."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import emulated_cann
import pytest
import torch
from helpers.attending import LENGTHS
from helpers.npu.attending import Attend
from helpers.thorough import AGAIN, MODE, thorough

import hal
from hal.errors import DeviceError, HalError

Opened = Callable[..., hal.Backend]
THREADS, TOKENS, TRIES = 4, 20, 20


@pytest.fixture(autouse=True)
def _switching_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


class Threads:
    """Runners of one model, and what each generates alone.

    Args:
        trained: the checkpoint.
        compiler: the compiler of decode steps.
    """

    def __init__(self, trained: Path, compiler: str) -> None:
        compilation = {"compiler": compiler, "capture_sizes": [2]}
        cache = {"num_tokens": 2048}
        self.backend = hal.open({"backend": "npu", "cache": cache, "compilation": compilation, "dtype": "float16"})
        model = hal.load_model(trained, self.backend)
        self.runners = [hal.Runner(model, self.backend) for _ in range(THREADS)]
        self.expected = [self.generated(number) for number in range(THREADS)]

    def generated(self, number: int) -> list[int]:
        prompts = [[5 + number, 6, 7], [8 + number] * (100 + 9 * number)]
        params = hal.SamplingParams(max_new_tokens=TOKENS)
        return [token.token_id for token in hal.generate(self.runners[number], prompts, params)]

    def run(self, *, streams: bool = False, tries: int = 1) -> tuple[list[list[int]], list[HalError]]:
        """Return what each runner generates beside the others, restarting after errors; and the errors."""
        found: list[list[int]] = [[] for _ in self.runners]
        errors: list[HalError] = []
        gate = threading.Barrier(len(self.runners))

        def work(number: int) -> None:
            torch.npu.set_device(0)
            if streams:
                torch.npu.set_stream(torch.npu.Stream())
            gate.wait()
            for _ in range(tries):
                try:
                    found[number] = self.generated(number)
                    return
                except HalError as error:
                    errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(len(self.runners))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found, errors


@pytest.fixture(scope="module", params=["graph", "npugraph_ex"])
def made(request: pytest.FixtureRequest, trained: Path) -> Threads:
    return Threads(trained, request.param)


@pytest.fixture
def threads(made: Threads) -> Iterator[Threads]:
    made.backend.activate()
    yield made
    hal.open("cpu")


@thorough(MODE, r"\[npugraph_ex\]")
def test_each_gets_its_own_tokens(threads: Threads) -> None:
    for streams in (False, True):
        assert threads.run(streams=streams) == (threads.expected, [])
    for seed in (1, 2):
        with emulated_cann.schedule(seed):
            assert threads.run() == (threads.expected, [])


@thorough(AGAIN)
def test_after_faults_too(threads: Threads) -> None:
    """Kernels fail, launches are refused, and kernels hang. Every thread without an error has the right tokens."""
    faults = [
        emulated_cann.faults.execution("FusedInferAttentionScoreV3", first=30),
        emulated_cann.faults.launch("FusedInferAttentionScoreV3", first=50),
        emulated_cann.faults.hang("SwiGlu", 0.05, first=40),
    ]
    for fault in faults:
        with fault as armed:
            found, errors = threads.run(tries=TRIES)
        assert armed.struck == 1
        assert errors
        assert found == threads.expected
    assert threads.run() == (threads.expected, [])


@thorough(MODE, r"\[npugraph_ex\]")
def test_a_runner_is_made_meanwhile(threads: Threads) -> None:
    """The new runner captures; npugraph_ex also replays and updates what it captured."""
    made = threading.Event()
    found: list[list[int]] = []
    errors: list[HalError] = []

    def work() -> None:
        torch.npu.set_device(0)
        try:
            while not made.is_set():
                found.append(threads.generated(0))
        except HalError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        runner = hal.Runner(threads.runners[0].model, threads.backend)
    finally:
        made.set()
        thread.join()
    assert not errors
    assert found
    assert all(each == threads.expected[0] for each in found)
    threads.runners[0] = runner
    assert threads.generated(0) == threads.expected[0]


@pytest.mark.parametrize("priority", [0, -1])
def test_a_replay_on_every_stream_of_the_pool(npu: Opened, priority: int) -> None:
    """One of the streams may be the one that runs updates: an update would then be queued behind its own replay."""
    attend = Attend(npu())
    graph = attend.backend.graph()
    output = graph.capture(attend.twice)
    attend.device_lens.copy_(torch.tensor(LENGTHS[2]))
    wanted = attend.twice(torch.tensor(LENGTHS[2], dtype=torch.int32)).cpu()
    torch.npu.synchronize()
    for _ in range(33):
        with emulated_cann.limits(stall=2), torch.npu.stream(torch.npu.Stream(priority=priority)):
            graph.replay(**attend.host_values(LENGTHS[2]))
            assert torch.equal(output.cpu(), wanted)


def test_no_thread_computes_on_a_stream_of_the_drivers(npu: Opened) -> None:
    """Work that a thread launched there would become part of another thread's update or capture."""
    backends = [npu() for _ in range(20)]
    ours = {each.stream_id for backend in backends for each in (backend.npu.capture_stream, *backend.npu.side_streams)}
    assert len(ours) == 4
    assert not ours & {torch.npu.Stream().stream_id for _ in range(32)}


def test_a_copy_arrives_behind_the_work_that_computes_it(npu: Opened) -> None:
    backend = npu()
    values = torch.arange(4.0).half().npu()
    with emulated_cann.faults.delay("Add", 0.3):
        copy = hal.HostCopy(backend, values + values)
        values.zero_()  # later in the stream
        assert not copy.arrived
    found: list[list[float]] = []
    reader = threading.Thread(target=lambda: found.append(copy.wait()[0].tolist()))
    reader.start()
    reader.join()
    assert copy.arrived
    assert found == [[0, 2, 4, 6]]


def test_a_failure_before_the_copy_is_raised_where_the_host_waits(npu: Opened) -> None:
    backend = npu()
    values = torch.arange(4.0).half().npu()
    with emulated_cann.faults.execution("Add"):
        copy = hal.HostCopy(backend, values + values)
        with pytest.raises(DeviceError, match="507015"):
            copy.wait()
