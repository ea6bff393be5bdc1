"""What this machine has, its cores and their use, and checks of the processes and threads that a person asks for.

:mod:`hal.config.bounds` holds the bounds that are the same on every machine."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from hal.config.bounds import check_count
from hal.errors import ConfigError

RANK_BYTES = 160 << 20
"""Memory of a rank without weights and states: 164 MiB, not shared with other processes, measured with torch 2.13."""
RANK_THREADS = 4
"""Threads of a rank: Python's, gloo's, and one at least that computes."""
RANK_FILES = 4
"""Open files of the starting process for each rank: two of its own, and the pipe and the socket that start it."""
THREADS_PER_CORE = 8
"""More threads than cores are slower, and some may be wanted to measure by how much."""


def host_memory() -> tuple[int, int]:
    """Return the free and the total bytes of the machine, or of its container if less."""
    import psutil

    machine, limits = psutil.virtual_memory(), list(memory_limits())
    free = max(0, min([machine.available, *(limit - used for limit, used in limits)]))
    return free, min([machine.total, *(limit for limit, _ in limits)])


def check_ranks(ranks: int) -> None:
    """Raise ConfigError unless this machine can start ``ranks`` processes that import torch."""
    free, _ = host_memory()
    files, tasks = _limit("RLIMIT_NOFILE"), _tasks()
    more = f"raise the limit with `ulimit -n {ranks * RANK_FILES}`, "
    wanted = [
        (free // RANK_BYTES, f"{RANK_BYTES >> 20} MiB of memory, and {free >> 20} MiB are free", ""),
        (files // RANK_FILES, f"{RANK_FILES} open files, and the limit is {files}", more),
        (tasks // RANK_THREADS, f"{RANK_THREADS} threads, and this user may have {tasks}", ""),
    ]
    most, reason, remedy = min(wanted)
    if ranks > most:
        raise ConfigError(
            f"{ranks} ranks cannot run on this machine: each takes at least {reason}",
            f"{remedy}use at most {max(1, most)} ranks here, or start them on several machines with torchrun",
        )


def check_threads(threads: int) -> None:
    """Raise ConfigError if there is no thread, or if there are far more than cores."""
    cores = os.cpu_count() or 1
    check_count(threads, THREADS_PER_CORE * cores, f"the number of threads for {cores} cores must be")


def _limit(name: str) -> int:
    """Return a limit of this process; the largest integer if there is none."""
    try:
        import resource
    except ImportError:  # Windows
        return sys.maxsize
    soft, _ = resource.getrlimit(getattr(resource, name))
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def _tasks() -> int:
    """Return the processes and threads that this process may start, of which others may have started some."""
    return min([_limit("RLIMIT_NPROC"), *(limit - used for limit, used in task_limits())])


def task_limits(root: Path = Path("/")) -> Iterator[tuple[int, int]]:
    """Yield the limit and the number of the processes and threads of each Linux control group of this process.

    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html, and cgroup-v1/pids.html beside it.
    """
    for folder, _ in control_groups("pids", root):
        try:
            limit, used = ((folder / file).read_text().strip() for file in ("pids.max", "pids.current"))
        except OSError:
            continue
        if limit != "max":
            yield int(limit), int(used)


def memory_limits(root: Path = Path("/")) -> Iterator[tuple[int, int]]:
    """Yield the limit and the usage of each Linux control group of this process, such as a container's, in bytes.

    The page cache does not count as used, because the kernel frees it on demand, as in its figure of available memory.

    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html, and cgroup-v1/memory.html beside it.
    """
    for folder, unified in control_groups("memory", root):
        files = ("memory.max", "memory.current") if unified else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        prefix = "" if unified else "total_"
        try:
            limit, used = ((folder / file).read_text().strip() for file in files)
            stat = dict(each.split() for each in (folder / "memory.stat").read_text().splitlines())
        except OSError:
            continue
        if limit != "max":
            cached = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
            yield int(limit), int(used) - cached


def control_groups(controller: str, root: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the folder of each Linux control group of this process, its own first, and whether it is of version 2."""
    groups = root / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / controller
        else:
            continue
        # Parent groups limit a process, too. In a container the path may be visible to the host only.
        own = top / path.strip("/")
        for folder in (own, *(each for each in own.parents if each.is_relative_to(top))):
            yield folder, not controllers


def usable_cores(root: Path = Path("/")) -> int:
    """Return the number of cores that this process may use: those of its affinity, or fewer if a quota limits it.

    A container's limit of CPU time is a quota of its control groups. Half a core and more count as one.
    """
    return max(1, min([affinity_cores(), *(math.floor(quota + 0.5) for quota in cpu_quotas(root))]))


def affinity_cores() -> int:
    """Return the number of cores of this process's affinity; of the machine on systems without affinity."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_quotas(root: Path = Path("/")) -> Iterator[float]:
    """Yield the quota of CPU time of each Linux control group of this process, in cores.

    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html, and scheduler/sched-bwc.html beside it.
    """
    for folder, unified in control_groups("cpu", root):
        try:
            if unified:
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        except OSError:
            continue
        if quota not in ("max", "-1"):
            yield int(quota) / int(period)


class RunningThreads:
    """Counts the threads of all processes that run or wait for a core.

    Source: proc_loadavg(5).
    """

    def __init__(self) -> None:
        try:
            self._file: int | None = os.open("/proc/loadavg", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = None

    @property
    def known(self) -> bool:
        """Whether the system counts them; only Linux does."""
        return self._file is not None

    def count(self) -> int:
        """Return the number at this moment, which includes the calling thread. It takes some 2 microseconds."""
        assert self._file is not None, "the system does not count them"
        return int(os.pread(self._file, 64, 0).split()[3].partition(b"/")[0])

    def others(self, seconds: float = 0.1) -> float | None:
        """Return how many threads of other processes run or wait on average; None if the system does not count them.

        The caller's process must have no other running threads.
        """
        if not self.known:
            return None
        counts, until = [], time.monotonic() + seconds
        while time.monotonic() < until:
            counts.append(self.count() - 1)
            time.sleep(seconds / 20)
        return round(sum(counts) / len(counts), 1)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def other_running_threads() -> float | None:
    """Return :meth:`RunningThreads.others` of a tenth of a second."""
    running = RunningThreads()
    try:
        return running.others()
    finally:
        running.close()


def crowded(others: float | None, threads: int) -> str:
    """Return a sentence if ``threads`` of this process and other processes' are more than the cores; else nothing."""
    cores = os.cpu_count() or 1
    if others is None or others + threads < cores + 0.5:
        return ""
    return f"other processes run {others:g} threads on the {cores} cores of this machine: hal is slower beside them"
