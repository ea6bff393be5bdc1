"""Sample inputs of operations, for tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Sample = tuple[Any, ...]
"""The positional arguments of one call."""


class Draw:
    """A seeded source of tensors of one dtype on one device.

    Values are drawn on the CPU and then moved, so that they are the same on every device.
    """

    def __init__(self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", seed: int = 0) -> None:
        self.dtype = dtype
        self.device = torch.device(device)
        self.seed = seed
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Return normally distributed values of the draw's dtype."""
        values = torch.randn(shape, generator=self._generator) * scale
        return values.to(self.dtype).to(self.device)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Return uniform integers from ``low`` to ``high - 1``."""
        return torch.randint(low, high, shape, generator=self._generator).to(dtype).to(self.device)

    def permutation(self, count: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Return the numbers less than ``count`` in random order."""
        return torch.randperm(count, generator=self._generator).to(dtype).to(self.device)

    def tensor(self, values: Any, dtype: torch.dtype) -> Tensor:
        """Return the given values on the draw's device."""
        return torch.tensor(values, dtype=dtype, device=self.device)
