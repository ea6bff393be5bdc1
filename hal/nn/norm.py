"""Normalization layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hal import ops


class RMSNorm(nn.Module):
    """:func:`hal.ops.rms_norm` over the last dimension, with its weight ``[width]``."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., width]`` to the same shape."""
        return ops.rms_norm(x, self.weight, self.eps)

    if TYPE_CHECKING:
        __call__ = forward
