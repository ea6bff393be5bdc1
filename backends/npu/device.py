"""The NPU as a device: PyTorch's device-generic runtime serves it, and what that raises is explained."""

from __future__ import annotations

import ctypes

import torch

from hal.device import Device
from hal.errors import HalError

from .failures import EXECUTION, explain

_THREAD_LEVEL = 0


class NpuDevice(Device):
    """One NPU. Streams, events and memory are those of :class:`hal.Device`.

    Attributes:
        failures: how many were explained or counted. Graphs that were under way at one must look after themselves.
    """

    def __init__(self, device: torch.device, name: str) -> None:
        super().__init__(device, name)
        self.failures = 0
        # torch_npu passes neither on. Either may be missing in an old CANN.
        library = ctypes.CDLL("libascendcl.so")  # by its SONAME, which gives the one that torch_npu loaded
        self._peek = getattr(library, "aclrtPeekAtLastError", None)
        self._take = getattr(library, "aclrtGetLastError", None)

    def explain(self, error: BaseException) -> HalError | None:
        """The typed error for what torch_npu raised, or None if it is none of the device's."""
        found = explain(error)
        self.failures += found is not None
        return found

    def count_failures(self) -> int:
        """``failures``, with one more if this thread met a failure of the device since, which nobody had explained."""
        if self._peek is not None and self._take is not None and self._peek(_THREAD_LEVEL) in EXECUTION:
            self._take(_THREAD_LEVEL)
            self.failures += 1
        return self.failures

    def synchronize(self) -> None:
        """Block the host until everything enqueued on the NPU has finished.

        Raises:
            DeviceError: something enqueued since the last wait failed.
        """
        try:
            super().synchronize()
        except (RuntimeError, torch.AcceleratorError) as error:
            if (known := self.explain(error)) is not None:
                raise known from error
            raise
