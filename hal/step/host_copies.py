"""Copies of the host's numbers to a device, which the host does not wait for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def to_device(values: Any, device: torch.device) -> Tensor:
    """Return numbers of the host as a tensor on a device, for what an engine sends in each step.

    The copy is from pinned memory and ordered on the current stream, so the host does not wait for the device's work.

    Args:
        values: a CPU tensor, an array, or a sequence of numbers of any depth. The dtype stays.
        device: the device. On the CPU, a tensor or an array is returned without a copy.
    """
    tensor = torch.as_tensor(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
