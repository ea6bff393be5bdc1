"""What happens to the ranks when one of them does something else: prints each rank's error and how long it took."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from hccl import Buffer, Communicator, Failed, cann, config, connect, run, wait_for

FAULT = b"execution", b"HcclAllReduce", ctypes.c_int64(1), ctypes.c_int64(1), 507015, 0


def attempt(act: Callable[[], Any]) -> dict[str, Any]:
    """Return the error of a call, and the seconds until it."""
    start = time.monotonic()
    try:
        act()
        error = None
    except Failed as failed:
        error = str(failed)
    return {"error": error, "seconds": time.monotonic() - start}


class Rank:
    """A rank with buffers of 8 elements, which has completed one all-reduce."""

    def __init__(self, rank: int, ranks: int, folder: str, seconds: int | None) -> None:
        self.folder = Path(folder)
        self.of: Communicator = connect(rank, ranks, folder, "group", seconds)
        self.a, self.b = Buffer(np.full(4096, rank + 1, np.float32)), Buffer(np.zeros(4096, np.float32))
        self.meet("connected")  # so that the limit of a collective does not bound how long a rank takes to come here
        self.reduce()

    def reduce(self, count: int = 8, dtype: str = "float32", op: str = "sum") -> None:
        self.of.all_reduce(self.a, self.b, count, dtype, op)
        self.of.synchronize()

    def broadcast(self, root: int = 0) -> None:
        self.of.broadcast(self.a, 8, root=root)
        self.of.synchronize()

    def meet(self, name: str) -> None:
        """Wait until all living ranks are here, without HCCL."""
        (self.folder / f"{name}{self.of.rank}").touch()
        for each in range(self.of.ranks):
            wait_for(self.folder / f"{name}{each}")


def fault(rank: int, ranks: int, folder: str, case: str, seconds: int | None = None) -> dict[str, Any]:
    """Run one case. The rank with the highest number is the one that differs."""
    if case == "connect":
        if rank == ranks - 1:
            return {}
        return {"first": attempt(lambda: connect(rank, ranks, folder))}
    self = Rank(rank, ranks, folder, seconds)
    odd = rank == ranks - 1
    first = attempt(lambda: CASES[case](self, odd))
    if case == "late":
        self.of.destroy()
        return {"first": first, "result": self.b.read()[:8].tolist()}
    self.meet("failed")
    again = attempt(self.reduce)  # must not pair with anything
    error = self.of.asynchronous_error
    self.of.destroy()
    fresh = connect(rank, ranks, folder, "again", 100)
    self.a.write(np.full(4096, rank + 1, np.float32))
    fresh.all_reduce(self.a, self.b, 8)
    fresh.synchronize()
    result = self.b.read()[:8].tolist()
    fresh.barrier()
    fresh.synchronize()
    fresh.destroy()
    return {"first": first, "again": again, "error": error, "result": result, "left": left_behind()}


def faults(rank: int, ranks: int, folder: str, cases: dict[str, int | None]) -> dict[str, Any]:
    """Run cases one after the other; each has a time limit for collectives, or None."""
    results = {}
    for case, seconds in cases.items():
        place = Path(folder) / case
        place.mkdir(exist_ok=True)
        results[case] = fault(rank, ranks, str(place), case, seconds)
    return results


def kill(self: Rank, odd: bool) -> None:
    if odd:
        os.kill(os.getpid(), signal.SIGKILL)
    self.reduce()


def killed(rank: int, ranks: int, folder: str, replay: bool) -> dict[str, Any]:
    """The last rank is killed, eager or after a graph was captured."""
    self = Rank(rank, ranks, folder, 60)
    if not replay:
        first = attempt(lambda: kill(self, rank == ranks - 1))
    else:
        with self.of.capture() as graph:
            for _ in range(50):
                self.of.all_reduce(self.a, self.b, 8)
        for _ in range(3):
            graph.replay()
        self.of.synchronize()
        if rank == ranks - 1:
            for _ in range(20):
                graph.replay()
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(2000):
            graph.replay()
        first = attempt(self.of.synchronize)
        graph.destroy()
    again = attempt(self.reduce)
    self.of.destroy()
    return {"first": first, "again": again, "left": left_behind()}


def late(self: Rank, odd: bool) -> None:
    if odd:
        time.sleep(1)
    self.reduce()


def never(self: Rank, odd: bool) -> None:
    if odd:
        wait_for(self.folder / "failed0")
        raise Failed("nothing", 0, "called nothing")
    self.reduce()


def injected(self: Rank, odd: bool) -> None:
    if odd:
        cann._runtime.emulated_cann_arm(*FAULT)
    self.reduce()


def skipped(self: Rank, odd: bool) -> None:
    """A task before the collective fails in a replay, which skips the rest."""
    with self.of.capture() as graph:
        self.of.broadcast(self.a, 8)
        self.of.all_reduce(self.a, self.b, 8)
    if odd:
        cann._runtime.emulated_cann_arm(b"execution", b"HcclBroadcast", *FAULT[2:])
    graph.replay()
    try:
        self.of.synchronize()
    finally:
        graph.destroy()


def destroyed_stream(self: Rank, odd: bool) -> None:
    """The stream is destroyed by force while the collective waits."""
    if odd:
        other = ctypes.c_void_p()
        cann.aclrtCreateStream(ctypes.byref(other))
        event = ctypes.c_void_p()
        cann.aclrtCreateEventExWithFlag(ctypes.byref(event), 1)
        cann._runtime.emulated_cann_arm(b"delay", b"HcclBroadcast", ctypes.c_int64(1), ctypes.c_int64(1), 0, 1000)
        stream, self.of.stream = self.of.stream, other
        self.of.broadcast(self.a, 8)
        self.of.all_reduce(self.a, self.b, 8)
        time.sleep(0.1)
        cann.aclrtDestroyStreamForce(other)
        self.of.stream = stream
        raise Failed("aclrtDestroyStreamForce", 0, "dropped HcclAllReduce")
    self.of.broadcast(self.a, 8)
    self.reduce()


def destroyed(self: Rank, odd: bool) -> None:
    if odd:
        self.of.destroy()
        self.of = connect_again(self)
        raise Failed("HcclCommDestroy", 0, "the communicator was destroyed")
    self.reduce()


def connect_again(self: Rank) -> Communicator:
    """Return a communicator of this rank alone, in place of one that was destroyed."""
    root, handle = (ctypes.c_char * 4108)(), ctypes.c_void_p()
    cann.HcclGetRootInfo(root)
    cann.HcclCommInitRootInfoConfig(1, root, 0, config(), ctypes.byref(handle))
    result = Communicator(handle, self.of.device)
    result.rank, result.ranks = self.of.rank, self.of.ranks
    return result


CASES: dict[str, Callable[[Rank, bool], None]] = {
    "late": late,
    "never": never,
    "injected": injected,
    "skipped": skipped,
    "destroyed": destroyed,
    "destroyed stream": destroyed_stream,
    "counts": lambda self, odd: self.reduce(9 if odd else 8),
    "sizes": lambda self, odd: self.reduce(4096 if odd else 8),
    "dtype": lambda self, odd: self.reduce(8, "int32" if odd else "float32"),
    "reduction": lambda self, odd: self.reduce(8, op="max" if odd else "sum"),
    "kind": lambda self, odd: self.broadcast() if odd else self.reduce(),
    "root": lambda self, odd: self.broadcast(1 if odd else 0),
    "message": lambda self, odd: _message(self, odd),
    "nobody receives": lambda self, odd: _nobody(self, odd),
    "uneven": lambda self, odd: _uneven(self, odd),
}


def _message(self: Rank, odd: bool) -> None:
    """The last rank expects more elements of rank 0 than it sends."""
    if odd:
        self.of.receive(self.b, 9, 0)
    elif self.of.rank == 0:
        self.of.send(self.a, 8, self.of.ranks - 1)
    else:
        self.reduce()
    self.of.synchronize()


def _nobody(self: Rank, odd: bool) -> None:
    if odd:
        wait_for(self.folder / "failed0")
    if self.of.rank == 0:
        self.of.send(self.a, 8, self.of.ranks - 1)
        self.of.synchronize()
    else:
        self.reduce()


def _uneven(self: Rank, odd: bool) -> None:
    counts = [3] * self.of.ranks if odd else [2] * self.of.ranks
    self.of.all_to_all_v(self.a, self.b, counts, [2] * self.of.ranks, "float32")
    self.of.synchronize()


def left_behind() -> dict[str, list[str]]:
    """Return what `leftovers` finds, once a worker has had the time to end its last task."""
    end = time.monotonic() + 2
    while any(leftovers().values()) and time.monotonic() < end:
        time.sleep(0.01)
    return leftovers()


def leftovers() -> dict[str, list[str]]:
    """Return the files and threads of HCCL that this process still has."""
    files = [os.readlink(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd") if _is_open(each)]
    threads = [(each / "comm").read_text().strip() for each in Path("/proc/self/task").iterdir()]
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "files": [each for each in files if "hccl" in each or "pidfd" in each],
        "threads": [each for each in threads if each == "npu-hccl"],
        "maps": [each for each in maps if "memfd:hccl" in each],
    }


def _is_open(descriptor: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{descriptor}")


if __name__ == "__main__":
    run({"faults": faults, "killed": killed})
