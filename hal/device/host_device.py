"""The host as a device: everything runs at once, so streams and events have nothing to wait for.

The CPU driver uses it, and so can any driver whose kernels run on the host.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from hal.device.device import Device
from hal.device.memory import MemoryStats
from hal.device.stream import Event, Stream


class HostStream(Stream):
    """A stream on which work has finished as soon as it is enqueued."""

    def __init__(self) -> None:
        pass

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """True."""
        return True

    def wait_stream(self, other: Stream) -> None:
        """Return at once."""

    def __enter__(self) -> HostStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass


class HostEvent(Event):
    """An event that has always been reached; it keeps the time it was recorded at."""

    def __init__(self) -> None:
        self.recorded = 0.0

    def record(self, stream: Stream) -> None:
        """Note the time."""
        self.recorded = time.perf_counter()

    def wait(self, stream: Stream) -> None:
        """Return at once."""

    def query(self) -> bool:
        """True."""
        return True

    def synchronize(self) -> None:
        """Return at once."""

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds between the two records."""
        if not isinstance(end, HostEvent):
            raise TypeError(f"an event of the host cannot be compared with {end!r}")
        return (end.recorded - self.recorded) * 1e3


class HostDevice(Device):
    """The host. PyTorch keeps no statistics of its memory, so the process's resident memory stands for them."""

    def __init__(self, name: str = "") -> None:
        super().__init__(torch.device("cpu"), name or f"CPU, {torch.get_num_threads()} threads")

    def stream(self, *, priority: int = 0) -> HostStream:
        """A no-op stream."""
        return HostStream()

    def event(self, *, timing: bool = False) -> HostEvent:
        """A no-op event, which can always be timed."""
        return HostEvent()

    def synchronize(self) -> None:
        """Return at once: nothing is asynchronous."""

    def memory_stats(self) -> MemoryStats:
        """Resident memory of the process, its peak, and what the machine has, or a container of it, if that is less."""
        import psutil

        process, machine = psutil.Process().memory_info(), psutil.virtual_memory()
        limits = list(memory_limits())
        return MemoryStats(
            allocated=process.rss,
            peak=max(process.rss, _peak_resident(process)),
            reserved=process.rss,
            free=max(0, min([machine.available, *(limit - used for limit, used in limits)])),
            total=min([machine.total, *(limit for limit, _ in limits)]),
        )

    def reset_peak(self) -> bool:
        """False: the system keeps the peak of a process's whole life."""
        return False

    def empty_cache(self) -> None:
        """Return at once: host memory goes back by itself."""


def _peak_resident(process: Any) -> int:
    # Not getrusage: its maximum is handed down from the parent process.
    status = Path("/proc/self/status")
    if status.exists():
        return next(int(line.split()[1]) << 10 for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(getattr(process, "peak_wset", process.rss))


def memory_limits(root: Path = Path("/")) -> Iterator[tuple[int, int]]:
    """The limits that Linux's control groups set to this process's memory, and what is used of each, in bytes.

    A container is such a group. The cache of files is not counted as used, because the kernel gives it up on demand, as
    it does before it says what a machine has available.

    Args:
        root: of the file system that says so.

    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html, and cgroup-v1/memory.html beside it.
    """
    groups = root / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, files, prefix = root / "sys/fs/cgroup", ("memory.max", "memory.current"), ""
        elif "memory" in controllers.split(","):
            top, prefix = root / "sys/fs/cgroup/memory", "total_"
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        # The groups around one limit it, too. In a container the path may be one that only the host can see.
        own = top / path.strip("/")
        for folder in (own, *(each for each in own.parents if each.is_relative_to(top))):
            try:
                limit, used = ((folder / file).read_text().strip() for file in files)
                stat = dict(each.split() for each in (folder / "memory.stat").read_text().splitlines())
            except OSError:
                continue
            if limit != "max":
                cached = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
                yield int(limit), int(used) - cached
