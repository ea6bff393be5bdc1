"""The host as a device. It runs everything synchronously, so streams and events are no-ops.

For the CPU driver, and any other driver whose kernels run on the host.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from hal.device.device import Device, Event, MemoryStats, Stream
from hal.device.host_capacity import host_memory
from hal.device.host_memory import give_back_pages


class HostStream(Stream):
    """A stream whose work has finished when the call that enqueues it returns."""

    def __init__(self) -> None:
        pass

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return True."""
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
    """An event that is always reached, with the time of its recording."""

    def __init__(self) -> None:
        self.recorded = 0.0

    def record(self, stream: Stream | None = None) -> None:
        """Record the current time."""
        self.recorded = time.perf_counter()

    def wait(self, stream: Stream) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return True."""
        return True

    def synchronize(self) -> None:
        """Return at once."""

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds between the two recordings."""
        if not isinstance(end, HostEvent):
            raise TypeError(f"elapsed_time needs another HostEvent, not {end!r}")
        return (end.recorded - self.recorded) * 1e3


class HostDevice(Device):
    """The host. Its memory statistics are those of the process, because PyTorch keeps none for the CPU."""

    def __init__(self, name: str = "") -> None:
        super().__init__(torch.device("cpu"), name or f"CPU, {torch.get_num_threads()} threads")

    def stream(self, *, priority: int = 0) -> HostStream:
        """Return a no-op stream."""
        return HostStream()

    def event(self, *, timing: bool = False) -> HostEvent:
        """Return a no-op event, which always supports timing."""
        return HostEvent()

    def synchronize(self) -> None:
        """Return at once: all work is synchronous."""

    def memory_stats(self) -> MemoryStats:
        """Return the process's resident memory and peak, and the memory of the machine, or of its container if less."""
        import psutil

        process = psutil.Process().memory_info()
        free, total = host_memory()
        return MemoryStats(
            allocated=process.rss,
            peak=max(process.rss, _peak_resident(process)),
            reserved=process.rss,
            free=free,
            total=total,
        )

    def give_back(self, tensors: Iterable[Tensor]) -> int | None:
        """Return the pages of tensors to the system, which gives others where the tensors are next used."""
        return give_back_pages(place for each in tensors if (place := self.place(each)) is not None)

    def place(self, tensor: Tensor) -> tuple[int, int] | None:
        """Return a tensor's first address and the one after its last; None if it keeps its pages, as one with gaps."""
        if tensor.layout is not torch.strided or not tensor.is_contiguous():
            return None
        return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes

    def reset_peak(self) -> bool:
        """Restart the process's peak. Return False if the operating system does not support it: only Linux does.

        Source: proc_pid_clear_refs(5).
        """
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        except OSError:
            return False
        return True

    def empty_cache(self) -> None:
        """Return the memory that the C library keeps for later allocations to the system.

        A large tensor may lie in such memory, which earlier tensors left. It then stays resident after it is freed.
        Only glibc has a call for it, and it may keep some: a process that has freed large tensors measures less growth.

        Source: malloc_trim(3).
        """
        if (trim := _malloc_trim()) is not None:
            trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    if sys.platform != "linux":
        return None
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return trim


def _peak_resident(process: Any) -> int:
    # Not getrusage: a child process inherits its maximum.
    status = Path("/proc/self/status")
    if status.exists():
        return next(int(line.split()[1]) << 10 for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(getattr(process, "peak_wset", process.rss))
