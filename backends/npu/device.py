"""The NPU as a device: PyTorch's device-generic runtime serves it, and what that raises is explained."""

from __future__ import annotations

import torch

from hal.device import Device

from .failures import explain


class NpuDevice(Device):
    """One NPU. Streams, events and memory are those of :class:`hal.Device`."""

    def synchronize(self) -> None:
        """Block the host until everything enqueued on the NPU has finished.

        Raises:
            DeviceError: something enqueued since the last wait failed.
        """
        try:
            super().synchronize()
        except (RuntimeError, torch.AcceleratorError) as error:
            if (known := explain(error)) is not None:
                raise known from error
            raise
