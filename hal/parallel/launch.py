"""Start of ranks on this machine, as ``hal generate --tensor-parallel 2`` does; see also ``torchrun``.

A rank is a process with torchrun's environment variables. The ranks meet at a store that the starting process holds,
so that no port has to be chosen. They end with the starting process, whatever ends it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, TypeVar

import attrs
import psutil
from torch import distributed
from torch._C._distributed_c10d import TCPStore

from hal.config.child_process import ChildProcess, signal_name
from hal.config.process_keeper import ProcessKeeper
from hal.device.host_capacity import check_ranks, host_memory, usable_cores
from hal.errors import CommunicationError
from hal.parallel.mesh import Mesh, explained, is_rank, launched

T = TypeVar("T")

POLL = 0.05
"""Seconds between two looks at the ranks."""
TOGETHER = 2.0
"""Seconds that rank 0 gets to show an error that all ranks have."""
FAILED_FILE = "RANKS_FAILED_FILE"
"""The variable that names a file, which a rank makes if it fails for another reason than a collective."""
YIELD = 3.0
"""Seconds that a rank whose collective failed leaves to the rank that is the cause, so that the cause is shown."""
END = 10.0
"""Seconds in which a rank ends after another has failed, or after it failed. It is then killed."""
AGAIN = 1.0
"""Seconds after which a rank that ends gets the signal again."""
INTERRUPTED = 0.5
"""Seconds in which a rank ends after this process was interrupted. It is then killed."""
_MEMORY = (
    "memory is the usual cause: lower cache.num_tokens or the batch size, use more ranks or a quantized checkpoint, or "
    "give the machine or its container more memory"
)
_CRASH = "native code crashed: set PYTHONFAULTHANDLER=1 to see where, and report it with the output of `hal doctor`"
_REMEDIES = {
    "SIGKILL": _MEMORY,
    "SIGBUS": "a mapped file was shortened, or memory or disk ran out: do not change the checkpoint meanwhile, and "
    "check the free space and memory",
    **dict.fromkeys(("SIGSEGV", "SIGABRT", "SIGILL", "SIGFPE", "SIGSYS", "SIGTRAP"), _CRASH),
}
_SENT = "another program or user sent the signal, such as a job manager at its time limit; start the command again"


def rank() -> int:
    """Return this process's number among the ranks that were started together; 0 if it is none.

    Raises:
        ConfigError: the variables of a rank do not hold its numbers.
    """
    return launched()[0] if is_rank() else 0


@attrs.frozen
class Failure:
    """The first rank that failed.

    Attributes:
        rank: the rank.
        status: its exit status, negative for the number of a signal; None if it did not end in time.
        text: what it wrote to stderr; empty for rank 0, whose stderr is this process's, and if rank 0 failed with the
            same error of hal's.
        ending: the problem and the remedy, if a signal ended it; else None.
    """

    rank: int
    status: int | None
    text: str
    ending: tuple[str, str] | None = None


def run_ranks(
    arguments: Sequence[str],
    ranks: int,
    *,
    stdin: bytes | None = None,
    stdout: IO[Any] | None = None,
    seconds: float | None = None,
    leads: bool = False,
) -> Failure | None:
    """Run Python in ``ranks`` processes, and wait for all of them.

    Rank 0 writes to this process's stdout and stderr. What others write to stdout is dropped. After the first failure,
    the remaining ranks are ended; so are all, and the processes that they started, if this process is interrupted or
    ends.

    Args:
        arguments: the arguments of Python, such as ``["-m", "package"]``.
        ranks: the number of processes.
        stdin: what each rank reads from stdin; None for nothing.
        stdout: the file that rank 0 writes to; None for this process's stdout.
        seconds: the time after which ranks that still run are ended; None for no limit.
        leads: whether rank 0 decides when all end: it gets this process's stdin, and its SIGINT and SIGTERM, which the
            other ranks ignore. Only in the main thread.

    Returns:
        The first failure; None if all ranks ended with exit status 0.

    Raises:
        ConfigError: this machine cannot run as many; none is started.
    """
    check_ranks(ranks)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    with ProcessKeeper() as keeper, ExitStack() as stack:
        started: list[ChildProcess] = []
        failed = {FAILED_FILE: str(keeper.folder / "failed")}
        stack.push(lambda kind, *_: _end(started, INTERRUPTED if kind else END, leads))
        memory = MemoryWatch()
        set_handler = stack.enter_context(_signal_handlers()) if leads else None
        for rank in range(ranks):
            if set_handler is not None and rank == 1:
                set_handler(signal.SIG_IGN)  # The ranks that start now inherit it.
            nothing = None if leads and not rank else subprocess.DEVNULL
            process = ChildProcess(
                arguments,
                keeper,
                variables={**variables_of_rank(rank, ranks, store.port), **failed},
                stdin=nothing if stdin is None else stdin,
                stdout=subprocess.DEVNULL if rank else stdout,
                in_foreground=True,
                shows_stderr=not rank,
            )
            started.append(process)
        if set_handler is not None:
            set_handler(functools.partial(_pass_on, started[0]))
        failure = _wait(started, math.inf if seconds is None else time.monotonic() + seconds, memory)
        if failure is None:
            keeper.ended()
        return failure


def variables_of_rank(rank: int, ranks: int, port: int) -> Mapping[str, str]:
    """Return torchrun's variables for one of the ranks of this machine, which meet at a store on ``port``."""
    found = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    if "OMP_NUM_THREADS" not in os.environ:  # The ranks share the cores.
        found["OMP_NUM_THREADS"] = str(max(1, usable_cores() // ranks))
    if "GLOO_SOCKET_IFNAME" not in os.environ and sys.platform == "linux":
        found["GLOO_SOCKET_IFNAME"] = "lo"  # The machine's name may not resolve.
    return found


def _wait(started: Sequence[ChildProcess], until: float, memory: MemoryWatch) -> Failure | None:
    while True:
        memory.look([process.pid for process in started])
        statuses = [process.poll() for process in started]
        if any(statuses):
            rank = next(rank for rank, status in enumerate(statuses) if status)
            text = started[rank].stderr()
            if rank and started[0].wait(TOGETHER) and (shown := started[0].error().get("message")) and shown in text:
                text = ""
            status = statuses[rank]
            ending = describe_signal(rank, len(started), -status, memory) if status and status < 0 else None
            return Failure(rank, status, text, ending)
        if all(status == 0 for status in statuses):
            return None
        if time.monotonic() > until:
            rank = statuses.index(None)
            return Failure(rank, None, started[rank].stderr())
        time.sleep(POLL)


def _end(started: Sequence[ChildProcess], seconds: float, leads: bool) -> None:
    for rank, process in enumerate(started):
        process.send(signal.SIGKILL if leads and rank else signal.SIGTERM)
    until = time.monotonic() + seconds
    for process in started:
        while process.wait(min(AGAIN, max(POLL, until - time.monotonic()))) is None:
            # A server has ended at the first one, but its rank waits for the cause.
            process.send(signal.SIGTERM if time.monotonic() < until else signal.SIGKILL)


@contextmanager
def _signal_handlers() -> Iterator[Callable[[Any], None]]:
    """Yield a function that sets the handler of SIGINT and SIGTERM, which the end of the block restores."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def set_handler(handler: Any) -> None:
        for number in before:
            signal.signal(number, handler)

    try:
        yield set_handler
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _pass_on(process: ChildProcess, number: int, frame: object) -> None:
    """Send a process the signal that this one got, unless a terminal has sent it to both."""
    if number != signal.SIGINT or not _is_in_foreground():
        process.send(number)


def _is_in_foreground() -> bool:
    """Return whether Ctrl-C in a terminal reaches this process, and all in its group."""
    try:
        with open("/dev/tty", "rb") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


@contextmanager
def yielding_to_the_cause() -> Iterator[None]:
    """Delay a CommunicationError of a rank, because another rank's failure may be its cause, and is shown then.

    Once the other rank has ended, :func:`run_ranks` ends this one. With a device, that takes the other a while.
    """
    failed = Path(file) if (file := os.environ.get(FAILED_FILE)) else None
    try:
        yield
    except CommunicationError:
        if is_rank():
            time.sleep(YIELD)
            if failed is not None and failed.exists():
                time.sleep(END)
        raise
    except Exception:
        if failed is not None:
            failed.touch()
        raise


def gathered(value: T, mesh: Mesh) -> list[T]:
    """Return the values of all ranks, in their order. Every rank of the mesh calls it.

    Raises:
        CommunicationError: another rank has ended, or does not come in time.
    """
    if mesh.size == 1:
        return [value]
    values: list[Any] = [None] * mesh.size
    with explained("exchange a value with the others"):
        distributed.all_gather_object(values, value)
    return values


def agreed(value: T, mesh: Mesh) -> T:
    """Return the value of rank 0, such as a random seed; see :func:`gathered`."""
    return gathered(value, mesh)[0]


class MemoryWatch:
    """The memory of the ranks while they run, since the system tells nothing about a process that has ended.

    Attributes:
        resident: the resident memory of each rank in bytes, as last seen.
    """

    def __init__(self) -> None:
        self.resident: list[int] = []
        self._processes: list[psutil.Process] = []
        self._ended_before = _ended_for_memory()

    def look(self, processes: Sequence[int]) -> None:
        """Read the memory of the ranks, given the process ID of each, which their starter has not waited for."""
        for number in processes[len(self._processes) :]:
            self._processes.append(psutil.Process(number))
            self.resident.append(0)
        for rank, process in enumerate(self._processes):
            with contextlib.suppress(psutil.Error):
                self.resident[rank] = process.memory_info().rss or self.resident[rank]  # 0 if it has ended

    def __str__(self) -> str:
        _, total = host_memory()
        used = ", ".join(f"{each / 2**30:.2f}" for each in self.resident)
        text = f"when last seen, the ranks used {used} GiB of the {total / 2**30:.2f} GiB of this machine or container"
        if ended := _ended_for_memory() - self._ended_before:
            text += f"; meanwhile, the kernel ended {ended} process{'es' * (ended > 1)} because memory ran out"
        return text


def describe_signal(rank: int, ranks: int, number: int, memory: MemoryWatch) -> tuple[str, str]:
    """Return the problem and the remedy of a rank that the signal ``number`` ended."""
    name = signal_name(number)
    remedy = _REMEDIES.get(name, _SENT)
    problem = f"rank {rank} of {ranks} was ended by {name}"
    return (f"{problem}; {memory}" if name in ("SIGKILL", "SIGBUS") else problem), remedy


def _ended_for_memory() -> int:
    """Return how many processes the kernel has ended because memory ran out; 0 if it does not tell.

    Source: ``oom_kill`` of https://docs.kernel.org/admin-guide/cgroup-v2.html, of all control groups in vmstat.
    """
    try:
        lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
