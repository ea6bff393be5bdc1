"""The host as a device: everything runs at once, so streams and events have nothing to wait for.

The CPU driver uses it, and so can any driver whose kernels run on the host.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from hal.device import Device
from hal.memory import MemoryStats
from hal.stream import Event, Stream


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
        """Resident memory of the process, its peak, and what the machine has."""
        import psutil

        process, machine = psutil.Process().memory_info(), psutil.virtual_memory()
        return MemoryStats(
            allocated=process.rss,
            peak=max(process.rss, _peak_resident(process)),
            reserved=process.rss,
            free=machine.available,
            total=machine.total,
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
