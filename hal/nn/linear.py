"""Linear projections, whole or split between ranks."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hal import ops
from hal.device.group import Group
from hal.nn.weights.share import EQUALLY, Share
from hal.nn.weights.weight import Consumer, Weight

OUT, IN = "out_features", "in_features"


class Projection(nn.Module):
    """The base of projections: how ranks split one, and how they join its results.

    Ranks that split ``in_features`` take a part of the input each, and add their results. Ranks that split
    ``out_features`` compute a part of the output each, which stays split unless ``gather``.

    Attributes:
        in_features: features of the whole input.
        out_features: features of the whole output.
        parts: the out_features of each part of a :class:`MergedLinear`, by name; empty for another layer.
        shard: the axis along which ranks may split the weight, ``out_features`` or ``in_features``, or None.
        share: how ranks share each part along that axis.
        gather: whether ranks that split ``out_features`` exchange their parts, so that each has the whole output.
        sizes: the out_features of each part on this rank; of the whole layer if it has no parts.
        group: the name of the group that joins the results; None if they need not be joined.
    """

    group: str | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        parts: Mapping[str, int],
        shard: str | None,
        share: Share,
        gather: bool,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.parts = in_features, out_features, dict(parts)
        self.shard, self.share, self.gather = shard, share, gather
        self.sizes = tuple(self.parts.values()) or (out_features,)

    def split(self, tensor: Group) -> None:
        """Compute this rank's part from now on. The loader fills the tensors accordingly.

        Args:
            tensor: the ranks that split each layer.

        Raises:
            ConfigError: the ranks cannot share the weight.
        """
        if self.shard == OUT:
            self.sizes = tuple(self.share.size(size, tensor.size) for size in self.sizes)
        if self.shard == IN or (self.shard == OUT and self.gather):
            self.group = tensor.name

    def join(self, output: Tensor) -> Tensor:
        """Return the layer's output from this rank's: their sum, or their concatenation without padding."""
        if self.group is None:
            return output
        if self.shard == IN:
            return ops.all_reduce(output, self.group)
        gathered = ops.all_gather(output, self.group)
        return gathered if gathered.shape[-1] == self.out_features else gathered[..., : self.out_features]


def projection_weight(layer: Projection, consumer: Consumer) -> Weight:
    """Return the declaration of a projection's weight ``[out_features, in_features]``, merged from its parts if any."""
    return Weight.merged(layer.parts, "weight", f"{OUT} {IN}", shard=layer.shard, consumer=consumer, share=layer.share)


def row_weight(layer: Projection, name: str, consumer: Consumer | None = None) -> Weight:
    """Return the declaration of a tensor with one element per row of a projection's weight, such as a bias.

    Ranks that split ``in_features`` add their results, so that one of them adds the bias.
    """
    shard = layer.shard if layer.shard == OUT else None
    return Weight.merged(
        layer.parts, name, OUT, shard=shard, consumer=consumer, share=layer.share, first_rank_only=layer.shard == IN
    )


class Linear(Projection):
    """:func:`hal.ops.linear` with a weight ``[out_features, in_features]`` and an optional bias.

    Args:
        in_features: features of the input.
        out_features: features of the output.
        bias: whether it has a bias.
        shard: the axis along which ranks may split the weight, ``out_features`` or ``in_features``, or None.
        share: how ranks share that axis.
        gather: whether each rank gets the whole output if ranks split ``out_features``.
        parts: see :class:`MergedLinear`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        shard: str | None = None,
        share: Share = EQUALLY,
        gather: bool = False,
        parts: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        super().__init__(in_features, out_features, parts=parts, shard=shard, share=share, gather=gather)
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias: nn.Parameter | None
        self.register_parameter("bias", nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None)

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The declarations of its tensors."""
        return {"weight": projection_weight(self, Consumer("linear", "weight")), "bias": row_weight(self, "bias")}

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in_features]`` to ``[..., out_features]``, of this rank if the layer is split."""
        return self.join(ops.linear(x, self.weight, self.bias))

    if TYPE_CHECKING:
        __call__ = forward


class MergedLinear(Linear):
    """Several projections of one input as one projection. Their outputs are concatenated in the last dimension.

    Args:
        in_features: features of the input.
        parts: the out_features of each part, in order, by the name of the checkpoint layer beside this one.
        bias: whether the parts have biases.
        shard: the axis along which ranks may split each part.
        share: how ranks share that axis.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool = False,
        shard: str | None = OUT,
        share: Share = EQUALLY,
    ) -> None:
        super().__init__(in_features, sum(parts.values()), bias=bias, shard=shard, share=share, parts=parts)
