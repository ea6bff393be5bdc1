"""The cores of the host that this process may use, and how many threads want them."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from pathlib import Path

from hal.device.host_capacity import control_groups


def usable_cores(root: Path = Path("/")) -> int:
    """Return the number of cores that this process may use: those of its affinity, or fewer if a quota limits it.

    A container's limit of CPU time is a quota of its control groups. Half a core and more count as one.

    Args:
        root: the root of the file system.
    """
    return max(1, min([affinity_cores(), *(math.floor(quota + 0.5) for quota in cpu_quotas(root))]))


def affinity_cores() -> int:
    """Return the number of cores of this process's affinity; of the machine on systems without affinity."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_quotas(root: Path = Path("/")) -> Iterator[float]:
    """Yield the quota of CPU time of each Linux control group of this process, in cores.

    Args:
        root: the root of the file system.

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

        Args:
            seconds: how long to count.
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
