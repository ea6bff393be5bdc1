"""Tensors of one value, which graphs compute with: each result is known beforehand."""

from __future__ import annotations

import torch
from torch import Tensor

from hal.drivers.backend import Backend
from hal.testing.case import require

SHAPE = (32, 64)


def filled(backend: Backend, value: float = 1.0) -> Tensor:
    """Return a tensor of SHAPE on the backend's device, filled with ``value``."""
    return torch.full(SHAPE, value, dtype=backend.limits.dtypes[0], device=backend.device.torch)


def holds(tensor: Tensor, value: float, what: str) -> None:
    """Raise AssertionError unless every element is ``value``."""
    found = sorted(set(tensor.cpu().float().flatten().tolist()))
    require(found == [value], f"{what}: {found[:4]} in place of {value}")
