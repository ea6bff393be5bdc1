"""Small programs, each with one order that is necessary, and that is left out if ``ordered`` is false.

The script prints, as JSON, the races that are found in each program with and without its order. A test runs it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
from collections.abc import Callable, Iterator

import emulated_cann
import torch
import torch.distributed as dist
import torch_npu  # noqa: F401

ACL = ctypes.CDLL("libascendcl.so")
Program = Callable[[bool], None]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    """Add a program to those that the script runs."""
    PROGRAMS[function.__name__] = function
    return function


@contextlib.contextmanager
def side(wait: bool = True, join: bool = False) -> Iterator[torch.npu.Stream]:
    """Run the block on another stream, which waits for the current one before, and the current one for it after."""
    current, stream = torch.npu.current_stream(), torch.npu.Stream()
    if wait:
        stream.wait_stream(current)
    with torch.npu.stream(stream):
        yield stream
    if join:
        current.wait_stream(stream)


def zeros(*shape: int) -> torch.Tensor:
    x = torch.zeros(shape or (64,), device="npu")
    torch.npu.synchronize()
    return x


@program
def two_streams_write(ordered: bool) -> None:
    x = zeros()
    with side(join=ordered):
        x.add_(1)
    x.mul_(2)


@program
def read_before_write(ordered: bool) -> None:
    x, y = zeros(), zeros()
    x.add_(1)
    with side(wait=ordered, join=True):
        torch.add(x, 1, out=y)


@program
def write_after_read(ordered: bool) -> None:
    x, y = zeros(), zeros()
    with side(join=ordered):
        torch.add(x, 1, out=y)
    x.zero_()


@program
def event_recorded_too_early(ordered: bool) -> None:
    x, y, event = zeros(), zeros(), torch.npu.Event()
    if not ordered:
        event.record()
    x.add_(1)
    if ordered:
        event.record()
    with side(wait=False) as stream:
        stream.wait_event(event)
        torch.add(x, 1, out=y)


@program
def event_waited_for_before_it_is_recorded(ordered: bool) -> None:
    x, y, event = zeros(), zeros(), torch.npu.Event()
    with side(wait=False) as stream:
        if not ordered:
            stream.wait_event(event)
    x.add_(1)
    event.record()
    with torch.npu.stream(stream):
        if ordered:
            stream.wait_event(event)
        torch.add(x, 1, out=y)


@program
def the_host_waits_for_another_stream(ordered: bool) -> None:
    x, y, other = zeros(), zeros(), torch.npu.Stream()
    with side() as stream:
        x.add_(1)
    (stream if ordered else other).synchronize()
    torch.add(x, 1, out=y)


@program
def copy_to_the_device_on_another_stream(ordered: bool) -> None:
    x, y, pinned = zeros(), zeros(), torch.ones(64).pin_memory()
    with side(join=ordered):
        x.copy_(pinned, non_blocking=True)
    torch.add(x, 1, out=y)


@program
def pinned_memory_is_copied_from_and_to(ordered: bool) -> None:
    x, y, pinned = zeros(), zeros(), torch.ones(64).pin_memory()
    pinned.copy_(x, non_blocking=True)
    with side(wait=ordered, join=True):
        y.copy_(pinned, non_blocking=True)


@program
def the_host_copies_what_is_not_computed(ordered: bool) -> None:
    x, host = zeros(), torch.empty(64)
    x.add_(1)
    if ordered:
        torch.npu.synchronize()
    ACL.aclrtMemcpy(*(ctypes.c_void_p(each) for each in (host.data_ptr(), 256, x.data_ptr(), 256)), 2)


@program
def columns(ordered: bool) -> None:
    x = zeros(16, 8)
    with side():
        x[:, :4].add_(1)
    x[:, 4 if ordered else 3 :].mul_(2)


@program
def rows_of_a_transposed_view(ordered: bool) -> None:
    x = zeros(4, 6, 8)
    with side():
        x.transpose(0, 2)[:, 2].add_(1)
    x[:, 3 if ordered else 2].mul_(2)


def captured(body: Callable[[], None], pool: tuple[int, int] | None = None) -> torch.npu.NPUGraph:
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, pool=pool):
        body()
    torch.npu.synchronize()
    return graph


@program
def an_input_is_written_while_a_graph_replays(ordered: bool) -> None:
    x, y = zeros(), zeros()
    graph = captured(lambda: torch.add(x, 1, out=y))
    graph.replay()
    with side(wait=ordered, join=True):
        x.fill_(3)


@program
def branches_of_a_graph(ordered: bool) -> None:
    x, y = zeros(), zeros()

    def body() -> None:
        with side(join=ordered) as stream:
            x.add_(1)
        torch.add(x, 1, out=y)
        torch.npu.current_stream().wait_stream(stream)

    captured(body).replay()


@program
def two_graphs_share_a_pool(ordered: bool) -> None:
    x, y, pool = zeros(), zeros(), torch.npu.graph_pool_handle()
    graphs = [captured(lambda: y.copy_((x + 1) * 2), pool) for _ in range(2)]
    graphs[0].replay()
    with side(wait=ordered, join=True):
        graphs[1].replay()


@program
def a_graph_replays_on_two_streams(ordered: bool) -> None:
    x = zeros()
    graph = captured(lambda: x.add_(1))
    graph.replay()
    with side(wait=ordered, join=True):
        graph.replay()


@program
def memory_is_freed_while_it_is_used(ordered: bool) -> None:
    address = ctypes.c_void_p()
    assert ACL.aclrtMalloc(ctypes.byref(address), ctypes.c_size_t(4096), 0) == 0
    stream = torch.npu.current_stream()
    size = ctypes.c_size_t(4096)
    assert ACL.aclrtMemsetAsync(address, size, 0, size, ctypes.c_void_p(stream.npu_stream)) == 0
    if ordered:
        stream.synchronize()
    assert ACL.aclrtFree(address) == 0
    with contextlib.suppress(RuntimeError):  # if the work has not begun
        stream.synchronize()


@program
def memory_is_reused_while_another_stream_uses_it(ordered: bool) -> None:
    x, y = zeros(1 << 16), zeros(1 << 16)
    with side() as stream:
        torch.add(x, 1, out=y)
    if ordered:
        x.record_stream(stream)
    address = x.data_ptr()
    del x
    with emulated_cann.faults.delay("Adds", 0.05) if ordered else contextlib.nullcontext():
        z = torch.ones(1 << 16, device="npu")
    assert ordered or z.data_ptr() == address


@program
def a_collective_is_not_waited_for(ordered: bool) -> None:
    x, y = zeros(), zeros()
    work = dist.all_reduce(x, async_op=True)
    if ordered:
        work.wait()
    torch.add(x, 1, out=y)
    work.wait()


@program
def a_copy_between_devices(ordered: bool) -> None:
    x, there = zeros(), torch.zeros(64, device="npu:1")
    torch.npu.synchronize(1)
    with torch.npu.device(1), side(wait=False) as stream:
        if ordered:
            stream.wait_stream(torch.npu.default_stream(0))
        there.add_(1)
    with side(wait=False) as here:
        if ordered:
            here.wait_stream(stream)
        there.copy_(x, non_blocking=True)


def main(names: list[str]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29611"}
    dist.init_process_group("hccl", rank=0, world_size=1, store=dist.HashStore())
    dist.all_reduce(zeros())
    results: dict[str, list[list[dict[str, str]]]] = {}
    for name in names or PROGRAMS:
        results[name] = []
        for ordered in (True, False):
            with emulated_cann.races() as found:
                PROGRAMS[name](ordered)
            results[name].append([{"first": each.first, "second": each.second, "text": str(each)} for each in found])
    json.dump(results, sys.stdout)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
