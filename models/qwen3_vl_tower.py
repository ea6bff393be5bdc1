"""The vision tower of Qwen3-VL.

Source: Qwen Team, *Qwen3-VL Technical Report*, 2025.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import isqrt
from typing import TYPE_CHECKING, Any

import attrs
import torch
from attrs.validators import deep_iterable, ge
from torch import Tensor, nn

from hal import ops
from hal.nn import ActivationName, EncoderItem, LayerNorm, Linear
from hal.nn.mlp import ACTIVATIONS
from hal.step import EncoderBatch, field

from .tower import (
    EPS,
    THETA,
    PatchEmbedding,
    Tower,
    TowerAttention,
    TowerConfig,
    axial_angles,
    frame_starts,
    patch_places,
)

TAPS = 4
"""The learned positions around a patch, of which its own is interpolated."""


@attrs.frozen(kw_only=True)
class Qwen3VLTowerConfig(TowerConfig):
    """The keys of the tower, under the same names."""

    num_position_embeddings: int = attrs.field(default=2304, validator=ge(1))
    deepstack_visual_indexes: tuple[int, ...] = attrs.field(default=(8, 16, 24), validator=deep_iterable(ge(0)))

    def __attrs_post_init__(self) -> None:
        TowerConfig.__attrs_post_init__(self)
        if isqrt(self.num_position_embeddings) ** 2 != self.num_position_embeddings:
            raise ValueError(f"num_position_embeddings is {self.num_position_embeddings}, not a square")
        levels = self.deepstack_visual_indexes
        if len(set(levels)) < len(levels) or any(each >= self.depth for each in levels):
            raise ValueError(f"deepstack_visual_indexes is {list(levels)}; give different layers of {self.depth}")


@attrs.frozen(eq=False)
class TowerBatch(EncoderBatch):
    """The patches of some images and videos.

    Attributes:
        places: ``[2, tokens]``, int64: the row and the column of each patch.
        taps: ``[tokens, 4]``, int64: the learned positions around it.
        tap_weights: ``[tokens, 4]``, float32: their weights.
        values: ``[tokens, features]``, float32.
    """

    places: Tensor = field("2 tokens", torch.int64)
    taps: Tensor = field(f"tokens {TAPS}", torch.int64)
    tap_weights: Tensor = field(f"tokens {TAPS}", torch.float32)


@lru_cache(maxsize=16)
def batch_of(features: int) -> Any:
    """Return the batch class of patches with so many numbers."""

    @attrs.frozen(eq=False)
    class SizedBatch(TowerBatch):
        values: Tensor = field(f"tokens {features}", torch.float32)

    return SizedBatch


def interpolation(places: Tensor, grid: tuple[int, int, int], side: int) -> tuple[Tensor, Tensor]:
    """Return the four learned positions around each patch, and their weights, ``[patches, 4]`` each.

    The corners of a frame are those of the square of learned positions.

    Args:
        places: ``[2, patches]``: rows and columns.
        grid: the item's numbers of patches.
        side: the rows of the square.
    """
    lows, highs, parts = [], [], []
    for place, size in zip(places, grid[1:], strict=True):
        at = place.float() * (side - 1) / max(size - 1, 1)
        low = at.floor()
        lows.append(low.long())
        highs.append((low.long() + 1).clamp(max=side - 1))
        parts.append(at - low)
    (top, left), (bottom, right), (down, across) = lows, highs, parts
    taps = [top * side + left, top * side + right, bottom * side + left, bottom * side + right]
    weights = [(1 - down) * (1 - across), (1 - down) * across, down * (1 - across), down * across]
    return torch.stack(taps, 1), torch.stack(weights, 1)


class LearnedPositions(nn.Module):
    """A table of learned positions, which ranks do not split."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, width), requires_grad=False)

    def forward(self, taps: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sums of some positions, ``[patches, width]``, computed in float32."""
        around = ops.embedding(taps.flatten(), self.weight).view(*taps.shape, self.weight.shape[1])
        return (around.float() * weights[:, :, None]).sum(1).to(self.weight.dtype)


class TowerMLP(nn.Module):
    """Two projections with an activation between them."""

    def __init__(self, width: int, inner: int, out: int, activation: ActivationName) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.linear_fc1 = Linear(width, inner, bias=True)
        self.linear_fc2 = Linear(inner, out, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[rows, width]`` to ``[rows, out]``."""
        return self.linear_fc2(self.activation(self.linear_fc1(x)))

    if TYPE_CHECKING:
        __call__ = forward


class TowerBlock(nn.Module):
    """A layer of the tower."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.norm1, self.norm2 = LayerNorm(width, EPS), LayerNorm(width, EPS)
        self.attn = TowerAttention(width, config.num_heads)
        self.mlp = TowerMLP(width, config.intermediate_size, width, config.hidden_act)

    def forward(self, hidden: Tensor, angles: tuple[Tensor, Tensor], starts: tuple[Tensor, Tensor]) -> Tensor:
        """Map ``[patches, hidden_size]`` to the same shape."""
        hidden = hidden + self.attn(self.norm1(hidden), angles, starts)
        return hidden + self.mlp(self.norm2(hidden))

    if TYPE_CHECKING:
        __call__ = forward


class Merger(TowerMLP):
    """Maps neighbouring patches to one embedding. The norm is before they are joined, or after."""

    def __init__(self, config: TowerConfig, *, norm_joined: bool) -> None:
        joined = config.hidden_size * config.spatial_merge_size**2
        super().__init__(joined, joined, config.out_hidden_size, "gelu")
        self.joined, self.norm_joined = joined, norm_joined
        self.norm = LayerNorm(joined if norm_joined else config.hidden_size, EPS)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[patches, hidden_size]`` to ``[embeddings, out_hidden_size]``."""
        if self.norm_joined:
            return super().forward(self.norm(x.view(-1, self.joined)))
        joined: Tensor = self.norm(x).view(-1, self.joined)
        return super().forward(joined)


class Qwen3VLTower(Tower):
    """The vision tower. An embedding is the last layer's, and then one of each layer in ``deepstack_visual_indexes``.

    These are in the order of the layers, and ``deepstack_merger_list`` in that of ``deepstack_visual_indexes``.

    Args:
        config: its sizes.
    """

    def __init__(self, config: Qwen3VLTowerConfig) -> None:
        super().__init__()
        self.config, self.merge = config, config.spatial_merge_size
        self.row_tokens, self.features = self.merge**2, config.features
        self.batch_type = batch_of(config.features)
        self.side = isqrt(config.num_position_embeddings)
        self.patch_embed = nn.ModuleDict({"proj": PatchEmbedding(config.patch, config.hidden_size, bias=True)})
        self.pos_embed = LearnedPositions(config.num_position_embeddings, config.hidden_size)
        self.blocks = nn.ModuleList(TowerBlock(config) for _ in range(config.depth))
        self.merger = Merger(config, norm_joined=False)
        levels = config.deepstack_visual_indexes
        self.width = config.out_hidden_size * (1 + len(levels))
        self.deepstack_merger_list = nn.ModuleList(Merger(config, norm_joined=True) for _ in levels)

    def batch(self, items: Sequence[EncoderItem]) -> EncoderBatch:
        places = [patch_places(each.grid, self.merge) for each in items]
        around = [interpolation(place, each.grid, self.side) for place, each in zip(places, items, strict=True)]
        starts = frame_starts(items)
        made: EncoderBatch = batch_of(self.config.features)(
            query_start_loc=starts,
            query_start_loc_host=starts,
            places=torch.cat(places, 1),
            taps=torch.cat([each for each, _ in around]),
            tap_weights=torch.cat([each for _, each in around]),
            values=torch.cat([each.values for each in items]),
        )
        return made

    def forward(self, batch: Any) -> Tensor:
        hidden = self.patch_embed["proj"](batch.values) + self.pos_embed(batch.taps, batch.tap_weights)
        angles = axial_angles(batch.places, self.config.head_dim, THETA)
        starts, deep = (batch.query_start_loc, batch.query_start_loc_host), list[Tensor]()
        levels = self.config.deepstack_visual_indexes
        for index, block in enumerate(self.blocks):
            hidden = block(hidden, angles, starts)
            if index in levels:
                deep.append(self.deepstack_merger_list[levels.index(index)](hidden))
        return torch.cat((self.merger(hidden), *deep), dim=1)

    if TYPE_CHECKING:
        __call__ = forward
