"""Tests for captures and graphs: the errors that CUDA reports, and the effects of a replay."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import pytest
from emulated_cuda.calls import GLOBAL, RELAXED, THREAD_LOCAL, Calls, in_a_process

UNSUPPORTED = "operation not permitted when stream is capturing"
INVALIDATED = "operation failed due to a previous error during capture"


def elsewhere(function: Callable[[], str]) -> str:
    """Return what a function returns in another thread."""
    said: list[str] = []
    thread = threading.Thread(target=lambda: said.append(function()))
    thread.start()
    thread.join()
    return said[0]


@pytest.mark.parametrize(
    "asked",
    [
        lambda cuda, stream: cuda.call("cudaStreamSynchronize", stream),
        lambda cuda, stream: cuda.call("cudaStreamQuery", stream),
        lambda cuda, stream: cuda.call("cudaDeviceSynchronize"),
        lambda cuda, stream: cuda.call("cudaStreamAddCallback", stream, 0, 0, 0),
    ],
    ids=["cudaStreamSynchronize", "cudaStreamQuery", "cudaDeviceSynchronize", "cudaStreamAddCallback"],
)
def test_waiting_breaks_a_capture_in_every_mode(cuda: Calls, asked: Callable[[Calls, int], str]) -> None:
    for mode in (GLOBAL, THREAD_LOCAL, RELAXED):
        stream, address = cuda.stream(), cuda.memory(8)
        assert cuda.begin(stream, mode) == "no error"
        assert asked(cuda, stream) == UNSUPPORTED
        assert cuda.fill(address, 1, 8, stream) == INVALIDATED
        assert cuda.end(stream) == (INVALIDATED, 0)
        assert cuda.call("cudaStreamSynchronize", stream) == "no error"


def test_unsafe_calls_are_a_question_of_modes(cuda: Calls) -> None:
    """Call cudaMalloc in the capturing thread and in another one."""

    def allocate() -> str:
        return "no error" if cuda_memory_made(cuda) else UNSUPPORTED

    for mode, here, there in (
        (GLOBAL, UNSUPPORTED, UNSUPPORTED),
        (THREAD_LOCAL, UNSUPPORTED, "no error"),
        (RELAXED, "no error", "no error"),
    ):
        for said, wanted in ((allocate, here), (lambda: elsewhere(allocate), there)):
            stream = cuda.stream()
            assert cuda.begin(stream, mode) == "no error"
            assert said() == wanted
            assert cuda.end(stream)[0] == ("no error" if wanted == "no error" else INVALIDATED)


def cuda_memory_made(cuda: Calls) -> bool:
    try:
        cuda.memory(8)
    except AssertionError:
        return False
    return True


def test_work_that_was_not_joined(cuda: Calls) -> None:
    origin, other, event, address = cuda.stream(), cuda.stream(), cuda.event(), cuda.memory(8)
    for joined in (False, True):
        assert cuda.begin(origin) == "no error"
        assert cuda.fill(address, 1, 8, origin) == "no error"
        assert cuda.call("cudaEventRecord", event, origin) == "no error"
        assert cuda.call("cudaStreamWaitEvent", other, event, 0) == "no error"
        assert cuda.fill(address, 2, 8, other) == "no error"
        if joined:
            cuda.call("cudaEventRecord", event, other)
            cuda.call("cudaStreamWaitEvent", origin, event, 0)
        said, graph = cuda.end(origin)
        assert said == ("no error" if joined else "capturing stream has unjoined work")
        assert bool(graph) == joined


def test_a_dependency_on_what_was_not_captured(cuda: Calls) -> None:
    stream, event = cuda.stream(), cuda.event()
    cuda.call("cudaEventRecord", event, cuda.stream())
    cuda.begin(stream)
    said = cuda.call("cudaStreamWaitEvent", stream, event, 0)
    assert said == "dependency created on uncaptured work in another stream"
    assert cuda.end(stream) == (INVALIDATED, 0)


def test_two_captures_cannot_be_one(cuda: Calls) -> None:
    first, second, event = cuda.stream(), cuda.stream(), cuda.event()
    cuda.begin(first)
    cuda.begin(second)
    cuda.call("cudaEventRecord", event, first)
    said = cuda.call("cudaStreamWaitEvent", second, event, 0)
    assert said == "operation would result in a merge of separate capture sequences"
    assert cuda.end(first) == cuda.end(second) == (INVALIDATED, 0)


def test_the_legacy_stream(cuda: Calls) -> None:
    """The legacy stream waits for blocking streams, so it is refused while one is captured.

    Non-blocking streams do not affect it.
    """
    address = cuda.memory(8)
    assert cuda.begin(0) == UNSUPPORTED
    for flags, said in (
        (0, "operation would make the legacy stream depend on a capturing blocking stream"),
        (1, "no error"),
    ):
        stream = cuda.stream(flags)
        cuda.begin(stream)
        assert cuda.fill(address, 1, 8, 0) == said
        assert cuda.end(stream)[0] == ("no error" if flags else INVALIDATED)


def test_an_event_of_a_capture_is_not_for_the_host(cuda: Calls) -> None:
    stream, event = cuda.stream(), cuda.event()
    for function in ("cudaEventQuery", "cudaEventSynchronize"):
        cuda.begin(stream)
        cuda.call("cudaEventRecord", event, stream)
        assert cuda.call(function, event) == "operation not permitted on an event last recorded in a capturing stream"
        assert cuda.end(stream) == (INVALIDATED, 0)


def test_where_a_capture_may_end(cuda: Calls) -> None:
    origin, other, event = cuda.stream(), cuda.stream(), cuda.event()
    cuda.begin(origin)
    cuda.call("cudaEventRecord", event, origin)
    cuda.call("cudaStreamWaitEvent", other, event, 0)
    assert cuda.end(other)[0] == "capture was not ended in the same stream as it began"
    cuda.end(origin)
    cuda.begin(origin, THREAD_LOCAL)
    said = elsewhere(lambda: cuda.end(origin)[0])
    assert said == "attempt to terminate a thread-local capture sequence from another thread"
    assert cuda.end(origin)[0] == "no error"
    cuda.begin(origin, RELAXED)
    assert elsewhere(lambda: cuda.end(origin)[0]) == "no error"


def test_a_capture_runs_nothing_and_a_replay_reads_memory_anew(cuda: Calls) -> None:
    stream, source, target = cuda.stream(), cuda.memory(8), cuda.memory(8)
    cuda.fill(source, 1, 8, stream)
    cuda.fill(target, 9, 8, stream)
    cuda.begin(stream)
    assert cuda.call("cudaMemcpyAsync", target, source, 8, 3, stream) == "no error"
    said, graph = cuda.end(stream)
    assert (said, cuda.read(target, 8, stream)) == ("no error", b"\x09" * 8)
    for value in (1, 2, 3):
        cuda.fill(source, value, 8, stream)
        assert cuda.launched(graph, stream) == "no error"
        assert cuda.read(target, 8, stream) == bytes([value] * 8)


def test_a_copy_from_pageable_memory_cannot_be_captured(cuda: Calls) -> None:
    stream, address, text = cuda.stream(), cuda.memory(8), ctypes.create_string_buffer(8)
    cuda.begin(stream)
    assert cuda.call("cudaMemcpyAsync", address, ctypes.addressof(text), 8, 1, stream) == UNSUPPORTED
    assert cuda.end(stream) == (INVALIDATED, 0)


@pytest.mark.parametrize(("joined", "orders"), [(True, 1), (False, 2)])
def test_branches_of_a_graph_run_in_any_order(joined: bool, orders: int) -> None:
    """Capture two fills of the same memory, where the second either waits for the first or does not."""
    ran = in_a_process(
        f"""
origin, other, event, address, found = cuda.stream(), cuda.stream(), cuda.event(), cuda.memory(8), set()
cuda.begin(origin)
cuda.call("cudaEventRecord", event, origin)
cuda.call("cudaStreamWaitEvent", other, event, 0)
cuda.fill(address, 1, 8, origin)
if {joined}:
    cuda.call("cudaEventRecord", event, origin)
    cuda.call("cudaStreamWaitEvent", other, event, 0)
cuda.fill(address, 2, 8, other)
cuda.call("cudaEventRecord", event, other)
cuda.call("cudaStreamWaitEvent", origin, event, 0)
said, graph = cuda.end(origin)
assert said == "no error", said
for turn in range(30):
    assert cuda.launched(graph, origin) == "no error"
    found.add(cuda.read(address, 1, origin)[0])
print(len(found))
""",
        seed=0,
    )
    assert ran.stdout == f"{orders}\n", ran.stdout + ran.stderr
