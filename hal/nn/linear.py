"""Linear projections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hal import ops
from hal.nn.weights.weight import Consumer, Weight

OUT, IN = "out_features", "in_features"


def projection_weight(parts: Mapping[str, int], shard: str | None, consumer: Consumer) -> Weight:
    """Return the declaration of a projection's weight ``[out_features, in_features]``, merged from ``parts`` if any."""
    return Weight.merged(parts, "weight", f"{OUT} {IN}", shard=shard, consumer=consumer)


def row_weight(parts: Mapping[str, int], name: str, shard: str | None, consumer: Consumer | None = None) -> Weight:
    """Return the declaration of a tensor with one element per row of a projection's weight, such as a bias."""
    return Weight.merged(parts, name, OUT, shard=shard if shard == OUT else None, consumer=consumer)


class Linear(nn.Module):
    """:func:`hal.ops.linear` with a weight ``[out_features, in_features]`` and an optional bias.

    Args:
        in_features: features of the input.
        out_features: features of the output.
        bias: whether it has a bias.
        shard: the axis along which ranks may split the weight, ``out_features`` or ``in_features``, or None.
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
        """The declarations of its tensors."""
        return {
            "weight": projection_weight(self.parts, self.shard, Consumer("linear", "weight")),
            "bias": row_weight(self.parts, "bias", self.shard),
        }

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in_features]`` to ``[..., out_features]``."""
        return ops.linear(x, self.weight, self.bias)

    if TYPE_CHECKING:
        __call__ = forward


class MergedLinear(Linear):
    """Several projections of one input as one projection. Their outputs are concatenated in the last dimension.

    Args:
        in_features: features of the input.
        parts: the out_features of each part, in order, by the name of the checkpoint layer beside this one.
        bias: whether the parts have biases.
        shard: the axis along which ranks may split each part.
    """

    def __init__(
        self, in_features: int, parts: Mapping[str, int], *, bias: bool = False, shard: str | None = OUT
    ) -> None:
        super().__init__(in_features, sum(parts.values()), bias=bias, shard=shard)
        self.parts = dict(parts)
