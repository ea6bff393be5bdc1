"""Normalization layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hal import ops
from hal.device.group import Group
from hal.nn.weights.weight import EQUALLY, Share, Weight


class RMSNorm(nn.Module):
    """:func:`hal.ops.rms_norm` over the last dimension, with its weight ``[width]``.

    Args:
        width: the number of features.
        eps: added to the mean square.
        offset: added to the checkpoint's weight, which is then float32, as the sum is not rounded: 1.0 in Gemma.
        share: how ranks share the features, if each has a part of them. The norm is over all.
        learned: whether the checkpoint has the weight, which is 1 otherwise.
    """

    weight: Tensor

    def __init__(
        self, width: int, eps: float, *, offset: float = 0.0, share: Share | None = None, learned: bool = True
    ) -> None:
        super().__init__()
        self.width, self.eps, self.offset, self.share, self.learned = width, eps, offset, share, learned
        self.group: str | None = None
        if learned:
            self.weight = nn.Parameter(torch.empty(width), requires_grad=False)
        else:
            self.register_buffer("weight", torch.empty(width))

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The declaration of its weight."""
        if not self.learned:
            return {"weight": Weight((), "width", values=(1.0,) * self.width)}
        shard, dtype = "width" if self.share else None, torch.float32 if self.offset else None
        weight = Weight(("weight",), "width", shard, dtype=dtype, offset=self.offset, share=self.share or EQUALLY)
        return {"weight": weight}

    def split(self, tensor: Group) -> None:
        """Normalize this rank's features from now on, by the mean square of all ranks' features."""
        if self.share is not None:
            self.group = tensor.name
            self.width = self.share.size(self.width, tensor.size) * tensor.size  # Ranks may repeat features.

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., width]`` to the same shape."""
        if self.group is None:
            return ops.rms_norm(x, self.weight, self.eps)
        wide = x.float()
        squares = ops.all_reduce(wide.square().sum(-1, keepdim=True), self.group)
        return (wide * torch.rsqrt(squares / self.width + self.eps) * self.weight.float()).to(x.dtype)

    if TYPE_CHECKING:
        __call__ = forward


class LayerNorm(nn.Module):
    """:func:`hal.ops.layer_norm` over the last dimension, with its weight ``[width]``.

    Args:
        width: the number of features.
        eps: added to the variance.
        bias: whether it has a bias ``[width]``.
        offset: added to the checkpoint's weight: 1.0 in Nemotron.
    """

    def __init__(self, width: int, eps: float, *, bias: bool = True, offset: float = 0.0) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.empty(width), requires_grad=False)
        self.bias: nn.Parameter | None
        self.register_parameter("bias", nn.Parameter(torch.empty(width), requires_grad=False) if bias else None)

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The declarations of its tensors."""
        return {"weight": Weight(("weight",), "width", offset=self.offset), "bias": Weight(("bias",), "width")}

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., width]`` to the same shape."""
        return ops.layer_norm(x, self.weight, self.bias, self.eps)

    if TYPE_CHECKING:
        __call__ = forward
