"""Projections."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hal import ops
from hal.nn.quantized import QuantizedLinear


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


def named_parts(path: str, module: Linear | QuantizedLinear) -> list[tuple[str, int]]:
    """The checkpoint's names of the layers that ``module``, at ``path`` in the model, is made of, and their rows.

    One for a :class:`Linear`; one for each part of a :class:`MergedLinear`, or of what stands in its place.
    """
    parts: Mapping[str, int] = getattr(module, "parts", {})
    if not parts:
        return [(path, module.weight.shape[0])]
    parent = path.rpartition(".")[0]
    return [(f"{parent}.{part}".lstrip("."), rows) for part, rows in parts.items()]
