"""The NPU as a device: PyTorch's device-generic runtime serves it, and what that raises is explained."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from hal.device.device import Device
from hal.errors import HalError

from .failures import EXECUTION, explain

_THREAD_LEVEL = 0


class NpuDevice(Device):
    """One NPU. Streams, events and memory are those of :class:`hal.Device`.

    Attributes:
        failures: how many were explained or counted. Graphs that were under way at one must look after themselves.
        capture_stream: that graphs are captured on.
        side_streams: that they are updated on, and freed from after a failure.
    """

    def __init__(self, device: torch.device, name: str) -> None:
        super().__init__(device, name)
        self.failures = 0
        self._counting = threading.Lock()
        self.capture_stream, *self.side_streams = _streams(device.index)
        # torch_npu passes neither on. Either may be missing in an old CANN.
        library = ctypes.CDLL("libascendcl.so")  # by its SONAME, which gives the one that torch_npu loaded
        self._peek = getattr(library, "aclrtPeekAtLastError", None)
        self._take = getattr(library, "aclrtGetLastError", None)

    def explain(self, error: BaseException) -> HalError | None:
        """The typed error for what torch_npu raised, or None if it is none of the device's."""
        found = explain(error)
        if found is not None:
            self._count()
        return found

    def count_failures(self) -> int:
        """``failures``, with one more if this thread met a failure of the device since, which nobody had explained."""
        if self._peek is not None and self._take is not None and self._peek(_THREAD_LEVEL) in EXECUTION:
            self._take(_THREAD_LEVEL)
            self._count()
        return self.failures

    def _count(self) -> None:
        with self._counting:
            self.failures += 1

    def stream_beside(self, *streams: Any) -> Any:
        """One of the side streams that is none of these, of which there may be two."""
        taken = {each.stream_id for each in streams}
        return next(each for each in self.side_streams if each.stream_id not in taken)

    def synchronize(self) -> None:
        """Block the host until everything enqueued on the NPU has finished.

        Raises:
            DeviceError: something enqueued since the last wait failed.
        """
        with self._explaining():
            super().synchronize()

    def wait_for(self, stream: Any) -> None:
        """Block the host until everything enqueued on one of torch_npu's streams has finished.

        Raises:
            DeviceError: something enqueued since the last wait failed.
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


@cache
def _streams(device: int) -> tuple[Any, ...]:
    """One to capture on, and three others. All backends of a device have the same.

    torch_npu has 32 streams of each priority, and hands them out in turn. Those of the ordinary one are what threads
    compute on: a launch on the stream of another thread's capture or update would become part of that.
    """
    import torch_npu

    return tuple(torch_npu.npu.Stream(device, priority=-1) for _ in range(4))
