"""Tests for streams and events: with a seed, work that nothing waited for may not have run yet."""

from __future__ import annotations

import pytest
from emulated_cuda.calls import Calls, in_a_process

TWO_STREAMS = """
first, second, event, stale = cuda.stream({flags}), cuda.stream({flags}), cuda.event(), 0
for value in range(1, 60):
    address = cuda.memory(8)
    cuda.fill(address, value, 8, {writer})
    {between}
    stale += cuda.read(address, 8, second) != bytes([value] * 8)
print(stale)
"""
WAIT = "cuda.call('cudaEventRecord', event, first); cuda.call('cudaStreamWaitEvent', second, event, 0)"


def stale(between: str, writer: str = "first", flags: int = 1, **options: int) -> int:
    ran = in_a_process(TWO_STREAMS.format(between=between, writer=writer, flags=flags), **options)
    assert ran.returncode == 0, ran.stderr
    return int(ran.stdout)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_missing_wait_shows(seed: int) -> None:
    assert stale("pass", seed=seed) > 10
    assert stale(WAIT, seed=seed) == 0
    assert stale("cuda.call('cudaStreamSynchronize', first)", seed=seed) == 0
    assert stale("cuda.call('cudaDeviceSynchronize')", seed=seed) == 0


def test_without_a_seed_work_runs_at_once() -> None:
    assert stale("pass") == 0


def test_the_legacy_stream_and_blocking_streams_wait_for_each_other() -> None:
    assert stale("pass", writer="0", flags=0, seed=0) == 0
    assert stale("pass", writer="0", flags=1, seed=0) > 10


def test_an_event_that_is_recorded_again_does_not_move_a_wait() -> None:
    """A wait refers to the record that preceded the wait."""
    ran = in_a_process(
        """
first, second, third, event, address = cuda.stream(), cuda.stream(), cuda.stream(), cuda.event(), cuda.memory(8)
for turn in range(40):
    cuda.fill(address, turn, 8, first)
    cuda.call("cudaEventRecord", event, first)
    cuda.call("cudaStreamWaitEvent", second, event, 0)
    cuda.call("cudaEventRecord", event, third)
    assert cuda.read(address, 8, second) == bytes([turn] * 8), turn
    assert cuda.call("cudaEventSynchronize", event) == "no error"
print("done")
""",
        seed=1,
    )
    assert ran.stdout == "done\n", ran.stderr


def test_a_query_tells_whether_work_is_done() -> None:
    ran = in_a_process(
        """
stream, event, address, said = cuda.stream(), cuda.event(), cuda.memory(8), set()
for turn in range(20):
    cuda.fill(address, 1, 8, stream)
    cuda.call("cudaEventRecord", event, stream)
    said |= {cuda.call("cudaEventQuery", event), cuda.call("cudaStreamQuery", stream)}
cuda.call("cudaStreamSynchronize", stream)
print(sorted(said), cuda.call("cudaEventQuery", event), cuda.call("cudaStreamQuery", stream), sep="|")
""",
        seed=0,
    )
    assert ran.stdout == "['device not ready', 'no error']|no error|no error\n", ran.stdout + ran.stderr


def test_handles_that_are_none(cuda: Calls) -> None:
    stream = cuda.stream()
    assert cuda.call("cudaStreamDestroy", stream) == "no error"
    assert cuda.call("cudaStreamSynchronize", stream) == "invalid resource handle"
    assert cuda.call("cudaSetDevice", 99) == "invalid device ordinal"
    assert cuda.call("cudaGetLastError") == "invalid device ordinal"
    assert cuda.call("cudaGetLastError") == "no error"
