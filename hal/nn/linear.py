"""Projections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hal import ops
from hal.nn.weight import Consumer, Weight

OUT, IN = "out_features", "in_features"


def projection_weight(parts: Mapping[str, int], shard: str | None, consumer: Consumer) -> Weight:
    """Return the declaration of a projection's weight ``[out_features, in_features]``, perhaps of several parts."""
    return Weight.merged(parts, "weight", f"{OUT} {IN}", shard=shard, consumer=consumer)


def row_weight(parts: Mapping[str, int], name: str, shard: str | None, consumer: Consumer | None = None) -> Weight:
    """Return the declaration of what a projection has for each row of its weight, such as a bias."""
    return Weight.merged(parts, name, OUT, shard=shard if shard == OUT else None, consumer=consumer)


class Linear(nn.Module):
    """:func:`hal.ops.linear` with its weight ``[out_features, in_features]`` and, if asked for, a bias.

    Args:
        in_features: of the input.
        out_features: of the output.
        bias: whether there is one.
        shard: the axis of the weight along which ranks may cut it, ``out_features`` or ``in_features``, or None.
    """

    parts: Mapping[str, int]

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False, shard: str | None = None) -> None:
        super().__init__()
        self.parts, self.shard = {}, shard
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias: nn.Parameter | None
        self.register_parameter("bias", nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None)

    @property
    def weights(self) -> Mapping[str, Weight]:
        """What its tensors are made of."""
        return {
            "weight": projection_weight(self.parts, self.shard, Consumer("linear", "weight")),
            "bias": row_weight(self.parts, "bias", self.shard),
        }

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]``."""
        return ops.linear(x, self.weight, self.bias)

    if TYPE_CHECKING:
        __call__ = forward


class MergedLinear(Linear):
    """Several projections of one input as one: their outputs lie one after another in the last dimension.

    Args:
        in_features: of all parts.
        parts: the checkpoint's name of each part (beside this layer's), and its out_features, in order.
        bias: whether every part has one.
        shard: the axis along which ranks may cut each part.
    """

    def __init__(
        self, in_features: int, parts: Mapping[str, int], *, bias: bool = False, shard: str | None = OUT
    ) -> None:
        super().__init__(in_features, sum(parts.values()), bias=bias, shard=shard)
        self.parts = dict(parts)
