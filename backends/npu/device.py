"""The NPU as a device: PyTorch's device-generic runtime serves it, and what that raises is explained."""

from __future__ import annotations

import torch

from hal.device import Device
from hal.errors import HalError

from .failures import explain


class NpuDevice(Device):
    """One NPU. Streams, events and memory are those of :class:`hal.Device`.

    Attributes:
        failures: how many were explained. Graphs that were under way at one must look after themselves.
    """

    def __init__(self, device: torch.device, name: str) -> None:
        super().__init__(device, name)
        self.failures = 0

    def explain(self, error: BaseException) -> HalError | None:
        """The typed error for what torch_npu raised, or None if it is none of the device's."""
        found = explain(error)
        self.failures += found is not None
        return found

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
