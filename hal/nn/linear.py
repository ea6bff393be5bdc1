"""Projections."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hal import ops


class Linear(nn.Module):
    """:func:`hal.ops.linear` with its weight ``[out_features, in_features]`` and, if asked for, a bias."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]``."""
        return ops.linear(x, self.weight, self.bias)


class MergedLinear(Linear):
    """Several projections of one input as one: their outputs lie one after another in the last dimension.

    Args:
        in_features: of all parts.
        parts: the checkpoint's name of each part (beside this layer's), and its out_features, in order.
        bias: whether every part has one.
    """

    def __init__(self, in_features: int, parts: Mapping[str, int], *, bias: bool = False) -> None:
        super().__init__(in_features, sum(parts.values()), bias=bias)
        self.parts = dict(parts)
