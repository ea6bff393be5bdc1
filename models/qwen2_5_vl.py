"""Qwen2.5-VL: Qwen2's decoder, with the embeddings of images and videos among its tokens, and a tower with windows.

Source: Bai et al., *Qwen2.5-VL Technical Report*, 2025.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self

import attrs
import torch
from attrs.validators import deep_iterable, ge
from torch import Tensor, nn

from hal.nn import (
    ActivationName,
    AxisRotaryEmbedding,
    AxisSections,
    Block,
    DecoderLayer,
    EncoderItem,
    GatedMLP,
    Linear,
    Placement,
    RMSNorm,
    SelfAttention,
    place_blocks,
    text_config,
    vision_config,
)
from hal.nn.encoder import VIDEO, merged
from hal.nn.mlp import ACTIVATIONS
from hal.step import EncoderBatch, field, host_twin
from hal.step.model_batches import padding_last

from .qwen2 import Qwen2Config
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
from .visual import VisualLM

SECTIONS = (16, 24, 24)


@attrs.frozen(kw_only=True)
class WindowTowerConfig(TowerConfig):
    """The keys of the tower, under the same names."""

    depth: int = attrs.field(default=32, validator=ge(1))
    hidden_size: int = attrs.field(default=3584, validator=ge(4))
    hidden_act: ActivationName = "silu"
    intermediate_size: int = attrs.field(default=3420, validator=ge(1))
    patch_size: int = attrs.field(default=14, validator=ge(1))
    tokens_per_second: float = attrs.field(default=4, validator=ge(0))
    window_size: int = attrs.field(default=112, validator=ge(1))
    fullatt_block_indexes: tuple[int, ...] = attrs.field(default=(7, 15, 23, 31), validator=deep_iterable(ge(0)))

    def __attrs_post_init__(self) -> None:
        TowerConfig.__attrs_post_init__(self)
        if self.window < 1:
            raise ValueError(f"window_size is {self.window_size}, less than the pixels of an embedding")

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read the table ``vision_config``. Published files name the channels ``in_chans``."""
        given = dict(config)
        if "in_chans" in given:
            given.setdefault("in_channels", given.pop("in_chans"))
        given.pop("spatial_patch_size", None)  # patch_size once more
        return super().from_config(given)

    @property
    def window(self) -> int:
        """The rows and columns of embeddings in a window."""
        return self.window_size // self.spatial_merge_size // self.patch_size


@attrs.frozen(eq=False)
class WindowBatch(EncoderBatch):
    """The patches of some images and videos, window by window.

    Attributes:
        places: ``[2, tokens]``, int64: the row and the column of each patch.
        window_start_loc: ``[sequences + 1]``, int32: the first patch of each window, then ``tokens`` repeatedly: there
            are at most as many windows as ``sequences``.
        window_start_loc_host: a CPU copy of ``window_start_loc``.
        values: ``[tokens, features]``, float32.
    """

    places: Tensor = field("2 tokens", torch.int64)
    window_start_loc: Tensor = field("sequences+1", torch.int32, pad=padding_last)
    window_start_loc_host: Tensor = host_twin("window_start_loc")


@lru_cache(maxsize=16)
def batch_of(features: int) -> Any:
    """Return the batch class of patches with so many numbers."""

    @attrs.frozen(eq=False)
    class SizedBatch(WindowBatch):
        values: Tensor = field(f"tokens {features}", torch.float32)

    return SizedBatch


def windows(grid: tuple[int, int, int], window: int) -> tuple[Tensor, list[int]]:
    """Return the order of an item's embeddings in which windows follow each other, and the size of each window.

    Args:
        grid: the numbers of embeddings along time, height and width.
        window: the rows and columns of a window; those at the edges may have fewer.
    """
    numbers = torch.arange(grid[0] * grid[1] * grid[2]).view(grid)
    parts = [
        part.flatten() for frame in numbers for rows in frame.split(window, dim=0) for part in rows.split(window, dim=1)
    ]
    return torch.cat(parts), [len(each) for each in parts]


class WindowTowerBlock(nn.Module):
    """A layer of the tower."""

    def __init__(self, config: WindowTowerConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(config.hidden_size, EPS), RMSNorm(config.hidden_size, EPS)
        self.attn = TowerAttention(config.hidden_size, config.num_heads)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, activation=config.hidden_act, bias=True)

    def forward(self, hidden: Tensor, angles: tuple[Tensor, Tensor], starts: tuple[Tensor, Tensor]) -> Tensor:
        """Map ``[patches, hidden_size]`` to the same shape."""
        hidden = hidden + self.attn(self.norm1(hidden), angles, starts)
        return hidden + self.mlp(self.norm2(hidden))

    if TYPE_CHECKING:
        __call__ = forward


class WindowMerger(nn.Module):
    """Maps neighbouring patches to one embedding."""

    def __init__(self, config: WindowTowerConfig) -> None:
        super().__init__()
        self.joined = config.hidden_size * config.spatial_merge_size**2
        self.ln_q = RMSNorm(config.hidden_size, EPS)
        first, last = (
            Linear(self.joined, self.joined, bias=True),
            Linear(self.joined, config.out_hidden_size, bias=True),
        )
        self.mlp = nn.ModuleDict({"0": first, "2": last})

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[patches, hidden_size]`` to ``[embeddings, out_hidden_size]``."""
        joined = self.mlp["0"](self.ln_q(x).view(-1, self.joined))
        output: Tensor = self.mlp["2"](ACTIVATIONS["gelu"](joined))
        return output


class WindowTower(Tower):
    """The vision tower. Its layers attend within windows, except those in ``fullatt_block_indexes``.

    Args:
        config: its sizes.
    """

    def __init__(self, config: WindowTowerConfig) -> None:
        super().__init__()
        self.config, self.merge, self.width = config, config.spatial_merge_size, config.out_hidden_size
        self.row_tokens, self.features = self.merge**2, config.features
        self.batch_type = batch_of(config.features)
        self.patch_embed = nn.ModuleDict({"proj": PatchEmbedding(config.patch, config.hidden_size, bias=False)})
        self.blocks = nn.ModuleList(WindowTowerBlock(config) for _ in range(config.depth))
        self.merger = WindowMerger(config)

    def batch(self, items: Sequence[EncoderItem]) -> EncoderBatch:
        places, values, sizes = [], [], list[int]()
        for each in items:
            order, own = windows(merged(each, self.merge), self.config.window)
            sizes += own
            values.append(each.values.unflatten(0, (-1, self.row_tokens))[order].flatten(0, 1))
            places.append(patch_places(each.grid, self.merge).unflatten(1, (-1, self.row_tokens))[:, order].flatten(1))
        of_windows = (torch.tensor([0, *sizes]) * self.row_tokens).cumsum(0).to(torch.int32)
        of_frames = frame_starts(items)
        # As many frames as windows; those behind the last one are empty.
        of_frames = torch.cat((of_frames, of_frames[-1:].expand(len(of_windows) - len(of_frames))))
        made: EncoderBatch = batch_of(self.config.features)(
            query_start_loc=of_frames,
            query_start_loc_host=of_frames,
            places=torch.cat(places, 1),
            window_start_loc=of_windows,
            window_start_loc_host=of_windows,
            values=torch.cat(values),
        )
        return made

    def forward(self, batch: Any) -> Tensor:
        hidden = self.patch_embed["proj"](batch.values)
        angles = axial_angles(batch.places, self.config.head_dim, THETA)
        frames = batch.query_start_loc, batch.query_start_loc_host
        within = batch.window_start_loc, batch.window_start_loc_host
        for index, block in enumerate(self.blocks):
            hidden = block(hidden, angles, frames if index in self.config.fullatt_block_indexes else within)
        output: Tensor = self.merger(hidden)
        return output

    def most_sequences(self, tokens: int) -> int:
        """Windows at the edges of an image may be smaller than others."""
        return 8 + tokens // self.row_tokens // max(1, self.config.window)

    def per_item(self, items: Sequence[EncoderItem], embeddings: Tensor) -> list[Tensor]:
        """Return the embeddings of each item in the order of its rows and columns."""
        found = []
        for each, own in zip(items, super().per_item(items, embeddings), strict=True):
            order, _ = windows(merged(each, self.merge), self.config.window)
            found.append(own.index_select(0, order.argsort().to(own.device)))
        return found

    if TYPE_CHECKING:
        __call__ = forward


def nested(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with the text model's keys in a table, where older files have them beside the tower's."""
    beside = {"vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"}
    beside |= {"architectures", "vision_token_id", "model_type"}
    found = dict(config)
    if config.get("text_config") is None:
        found["text_config"] = {key: value for key, value in config.items() if key not in beside}
    text = text_config(found)
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(table := text.get(key), Mapping):
            kind = {name: "default" for name in ("type", "rope_type") if table.get(name) == "mrope"}
            text[key] = {**table, **kind}
    tables = [each for key in ("rope_parameters", "rope_scaling") if isinstance(each := text.get(key), Mapping)]
    if text.get("rope_theta") is None and all(each.get("rope_theta") is None for each in tables):
        text["rope_theta"] = 1e6
    found["text_config"] = text
    return found


class Qwen2_5_VLForConditionalGeneration(VisualLM):  # noqa: N801 - the architecture's name
    visual: WindowTower

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        config = nested(config)
        keys = text_config(config)
        text, tower = Qwen2Config.from_config(keys), WindowTowerConfig.from_config(vision_config(config))
        sections = AxisSections.from_config(keys, SECTIONS, interleaved=False)
        rotary = AxisRotaryEmbedding(text.head_dim, text.rope, sections)

        def layer(index: int) -> DecoderLayer:
            attention = SelfAttention(text, rotary, window=text.window(index), bias=(True, False))
            mlp = GatedMLP(text.hidden_size, text.intermediate_size, activation=text.hidden_act)
            return DecoderLayer(text, attention, mlp)

        model = cls(text, map(layer, range(text.num_hidden_layers)))
        return model.attach(WindowTower(tower), tower.out_hidden_size, config)

    def tokens_of(self, item: EncoderItem, encode: Callable[[str], Sequence[int]] | None) -> list[int]:
        """Return a placeholder for each embedding: the positions tell the times."""
        return super().tokens_of(item, None)

    def place(self, tokens: Sequence[int], items: Sequence[EncoderItem]) -> Placement:
        rate, merge = self.visual.config.tokens_per_second, self.visual.merge
        blocks = [
            Block(each.kind, merged(each, merge), rate * (each.seconds or 1.0) if each.kind == VIDEO else 1.0)
            for each in items
        ]
        return place_blocks(tokens, blocks, self.placeholders)
