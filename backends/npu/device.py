"""The NPU device: PyTorch's device-generic runtime, with torch_npu's exceptions mapped to hal's errors."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from operator import attrgetter
from typing import Any

import attrs
import torch

from hal.device.device import Device, MemoryStats
from hal.device.host_capacity import host_memory
from hal.errors import HalError

from .emulation import is_active
from .failures import EXECUTION, explain

_THREAD_LEVEL = 0
_stream_id = attrgetter("stream_id")
UPDATING = threading.RLock()
"""Held from the start of a replay until its update is complete, and during recovery from a failure.

An update is several calls on a stream, and all backends and threads share torch_npu's few streams. Two concurrent
updates would write into each other's task groups. The lock also orders each update after all earlier replays of the
step, which rules out a deadlock between them.
"""


class NpuDevice(Device):
    """One NPU. Streams, events and memory are those of :class:`hal.vendor.Device`.

    Attributes:
        failures: the number of device failures so far. A graph that sees it change since its last replay recovers.
        capture_stream: the stream for captures.
        side_streams: the streams for updates of graphs, and for recovery after a failure.
    """

    def __init__(self, device: torch.device, name: str) -> None:
        super().__init__(device, name)
        self.failures = 0
        self._known_streams: dict[int, Any] = {}
        self._counting = threading.Lock()
        self.capture_stream, *self.side_streams = _streams(device.index)
        # torch_npu exposes neither function. An old CANN may lack either.
        library = ctypes.CDLL("libascendcl.so")  # the SONAME resolves to the library that torch_npu loaded
        self._peek = getattr(library, "aclrtPeekAtLastError", None)
        self._take = getattr(library, "aclrtGetLastError", None)

    def memory_stats(self) -> MemoryStats:
        """Return the statistics. An emulated NPU has no more free memory than the host."""
        stats = super().memory_stats()
        return attrs.evolve(stats, free=min(stats.free, host_memory()[0])) if is_active() else stats

    def explain(self, error: BaseException) -> HalError | None:
        """Return the HalError for an exception of torch_npu's; None if the device did not cause it."""
        found = explain(error)
        if found is not None:
            self._count()
        return found

    def count_failures(self) -> int:
        """Return ``failures``, after adding a pending error of this thread that :meth:`explain` has not seen."""
        if self._peek is not None and self._take is not None and self._peek(_THREAD_LEVEL) in EXECUTION:
            self._take(_THREAD_LEVEL)
            self._count()
        return self.failures

    def _count(self) -> None:
        with self._counting:
            self.failures += 1

    def current_stream(self) -> Any:
        """Return the thread's current stream, as torch_npu's function does, which takes ten times as long."""
        stream = torch.accelerator.current_stream(self.torch.index)  # a number, which takes half as long as a device
        known = self._known_streams.get(stream.stream_id)
        if known is None:
            known = self._known_streams[stream.stream_id] = native_stream(stream)
        return known

    def stream_beside(self, *streams: Any) -> Any:
        """Return a side stream that differs from the given streams, of which there are at most two."""
        taken = set(map(_stream_id, streams))
        for each in self.side_streams:
            if each.stream_id not in taken:
                break
        return each

    def synchronize(self) -> None:
        """Block the host until all work enqueued on the NPU has finished.

        Raises:
            DeviceError: work enqueued since the last wait failed.
        """
        with self._explaining():
            super().synchronize()

    def empty_cache(self) -> None:
        """Return unused memory of the allocator's cache to the device.

        torch_npu waits for the device, and other threads of Python wait for torch_npu. If one of them had started a
        replay and not yet updated it, the device would wait for that thread.
        """
        with UPDATING, self._explaining():
            super().empty_cache()

    def wait_for(self, stream: Any) -> None:
        """Block the host until all work enqueued on a torch_npu stream has finished.

        Raises:
            DeviceError: work enqueued since the last wait failed.
        """
        with self._explaining():
            stream.synchronize()

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, torch.AcceleratorError) as error:
            if (known := self.explain(error)) is not None:
                raise known from error
            raise


def native_stream(stream: torch.Stream) -> Any:
    """Return a stream of PyTorch's device-generic runtime as torch_npu's."""
    import torch_npu

    return torch_npu.npu.Stream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )


@cache
def _streams(device: int) -> tuple[Any, ...]:
    """Return one capture stream and three side streams, shared by all backends of the device.

    torch_npu allots 32 streams of each priority in turn, and threads compute on those of the default priority. A launch
    on the stream of another thread's capture or update would become part of it; hence the other priority.
    """
    import torch_npu

    return tuple(torch_npu.npu.Stream(device, priority=-1) for _ in range(4))
