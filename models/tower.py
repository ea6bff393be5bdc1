"""What towers share: their config, patches and their places, and attention within frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isqrt
from typing import Any, Self

import attrs
import torch
from attrs.validators import ge
from torch import Tensor, nn

from hal import ops
from hal.config import read_model_config
from hal.nn import ActivationName, Encoder, EncoderItem, Linear
from hal.nn.encoder import IMAGE, check_items

EPS = 1e-6
"""Epsilon of a tower's norms."""
THETA = 1e4
"""The base of the frequencies by which rows and columns turn."""


@attrs.frozen(kw_only=True)
class TowerConfig:
    """The keys of ``vision_config`` that towers share, under the same names."""

    depth: int = attrs.field(default=27, validator=ge(1))
    hidden_size: int = attrs.field(default=1152, validator=ge(4))
    hidden_act: ActivationName = "gelu_pytorch_tanh"
    intermediate_size: int = attrs.field(default=4304, validator=ge(1))
    num_heads: int = attrs.field(default=16, validator=ge(1))
    in_channels: int = attrs.field(default=3, validator=ge(1))
    patch_size: int = attrs.field(default=16, validator=ge(1))
    spatial_merge_size: int = attrs.field(default=2, validator=ge(1))
    temporal_patch_size: int = attrs.field(default=2, validator=ge(1))
    out_hidden_size: int = attrs.field(default=3584, validator=ge(1))

    def __attrs_post_init__(self) -> None:
        if self.hidden_size % (4 * self.num_heads):
            raise ValueError(
                f"hidden_size is {self.hidden_size}, of {self.num_heads} heads; it must be a multiple of four times "
                "their number"
            )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read the table ``vision_config``."""
        return read_model_config(cls, config)

    @property
    def head_dim(self) -> int:
        """Elements per head."""
        return self.hidden_size // self.num_heads

    @property
    def features(self) -> int:
        """The numbers of a patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def patch(self) -> tuple[int, int, int, int]:
        """The channels, and the numbers of pixels along time, height and width, of a patch."""
        return self.in_channels, self.temporal_patch_size, self.patch_size, self.patch_size


class Tower(Encoder):
    """The base of towers. An embedding may have several parts side by side, each of the text model's width.

    Attributes:
        width: the elements of an embedding.
        merge: the rows and columns of patches that become one embedding.
        features: the numbers of a patch.
    """

    width: int
    merge: int
    features: int

    def check(self, items: Sequence[EncoderItem]) -> None:
        check_items(items, self.features, self.merge)

    def example(self, tokens: int) -> EncoderItem:
        side = max(isqrt(tokens) // self.merge, 1) * self.merge
        return EncoderItem(IMAGE, torch.zeros(side * side, self.features), (1, side, side), b"")


class PatchEmbedding(nn.Module):
    """The first layer of a tower, a convolution without overlap, as one product.

    Args:
        shape: the channels, and the numbers of pixels along time, height and width, of a patch.
        width: features of the output.
        bias: whether it has a bias.
    """

    def __init__(self, shape: tuple[int, int, int, int], width: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, *shape), requires_grad=False)
        self.bias: nn.Parameter | None
        self.register_parameter("bias", nn.Parameter(torch.empty(width), requires_grad=False) if bias else None)

    def forward(self, patches: Tensor) -> Tensor:
        """Map ``[patches, features]`` to ``[patches, width]``."""
        return ops.linear(patches.to(self.weight.dtype), self.weight.flatten(1), self.bias)


class TowerAttention(nn.Module):
    """Attention within each of some sequences, such as frames, without a mask."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, width // heads
        self.qkv = Linear(width, 3 * width, bias=True)
        self.proj = Linear(width, width, bias=True)

    def forward(self, hidden: Tensor, angles: tuple[Tensor, Tensor], starts: tuple[Tensor, Tensor]) -> Tensor:
        """Map ``[patches, width]`` to the same shape.

        Args:
            hidden: the patches.
            angles: cos and sin.
            starts: the starts of the sequences, and their host twin.
        """
        query, key, value = (each.view(-1, self.heads, self.head_dim) for each in self.qkv(hidden).chunk(3, dim=-1))
        query, key = ops.rotary_embedding(query, key, *angles, False)
        attended = ops.packed_attention(query, key, value, *starts, self.head_dim**-0.5, False)
        output: Tensor = self.proj(attended.flatten(1))
        return output


def patch_places(grid: tuple[int, int, int], merge: int) -> Tensor:
    """Return the row and the column of each patch of an item, ``[2, patches]``, int64.

    The patches of ``merge x merge`` neighbours, which become one embedding, follow each other.
    """
    time, height, width = grid
    row, column = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    blocks = (height // merge, merge, width // merge, merge)
    return torch.stack([each.reshape(blocks).transpose(1, 2).flatten().repeat(time) for each in (row, column)])


def frame_starts(items: Sequence[EncoderItem]) -> Tensor:
    """Return the first patch of each frame of some items, then their number, int32."""
    sizes = [each.grid[1] * each.grid[2] for each in items for _ in range(each.grid[0])]
    return torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)


def axial_angles(places: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cos and sin of two-dimensional positions, each ``[patches, head_dim]``, float32.

    The first half of a head's pairs turns by the row, the second by the column, with the same frequencies.

    Args:
        places: ``[2, patches]``, int64: rows and columns.
        head_dim: elements per head, a multiple of 4.
        theta: the base of the frequencies.
    """
    half = head_dim // 2
    exponent = torch.arange(0, half, 2, dtype=torch.int64, device=places.device).float() / half
    angles = (places.float()[:, :, None] * (1.0 / theta**exponent)).transpose(0, 1).flatten(1).repeat(1, 2)
    return angles.cos(), angles.sin()
