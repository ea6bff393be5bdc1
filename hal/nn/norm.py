"""Normalization layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hal import ops
from hal.nn.weights.weight import Weight


class RMSNorm(nn.Module):
    """:func:`hal.ops.rms_norm` over the last dimension, with its weight ``[width]``.

    Args:
        width: the number of features.
        eps: added to the mean square.
        offset: added to the checkpoint's weight, which is then float32, as the sum is not rounded: 1.0 in Gemma.
    """

    def __init__(self, width: int, eps: float, *, offset: float = 0.0) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.empty(width), requires_grad=False)

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The declaration of its weight."""
        return {
            "weight": Weight(("weight",), "width", dtype=torch.float32 if self.offset else None, offset=self.offset)
        }

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., width]`` to the same shape."""
        return ops.rms_norm(x, self.weight, self.eps)

    if TYPE_CHECKING:
        __call__ = forward


class LayerNorm(nn.Module):
    """:func:`hal.ops.layer_norm` over the last dimension, with its weight ``[width]``.

    Args:
        width: the number of features.
        eps: added to the variance.
        bias: whether it has a bias ``[width]``.
    """

    def __init__(self, width: int, eps: float, *, bias: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width), requires_grad=False)
        self.bias: nn.Parameter | None
        self.register_parameter("bias", nn.Parameter(torch.empty(width), requires_grad=False) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., width]`` to the same shape."""
        return ops.layer_norm(x, self.weight, self.bias, self.eps)

    if TYPE_CHECKING:
        __call__ = forward
