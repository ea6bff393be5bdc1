"""The explanation of a rank that a signal ended: what it was, how much memory was in use, and what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import psutil

from hal.config.child_process import signal_name
from hal.device.host_capacity import host_memory

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
