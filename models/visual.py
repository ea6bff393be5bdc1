"""What families that read images and videos share: the decoder among whose tokens embeddings are, and positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isqrt
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import attrs
import torch
from torch import Tensor, nn

from hal import ops
from hal.config import read_model_config
from hal.nn import Angles, Decoder, DecoderLayer, DecoderLM, Encoder, EncoderItem, LayerState, Linear
from hal.nn.axis_placement import check_items, expanded
from hal.nn.encoder import IMAGE, VIDEO
from hal.step import AxesBatch, Batch, embedding_batch


@attrs.frozen(kw_only=True)
class VisualConfig:
    """The keys of config.json beside those of the text model and of the tower.

    Attributes:
        image_token_id: the placeholder of an image's embedding in a prompt.
        video_token_id: that of a video's.
    """

    image_token_id: int
    video_token_id: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> VisualConfig:
        """Read a checkpoint's config.json.

        Raises:
            ConfigError: a key is missing, or no integer.
        """
        names = [each.name for each in attrs.fields(cls)]
        return read_model_config(cls, {name: config[name] for name in names if name in config})

    @property
    def placeholders(self) -> dict[int, str]:
        """The kinds of the items, by their placeholder's token."""
        return {self.image_token_id: IMAGE, self.video_token_id: VIDEO}


class DeepLayer(DecoderLayer):
    """A layer whose output gets a further part of the embeddings, as DeepStack's first layers do.

    Source: Meng et al., *DeepStack: Deeply Stacking Visual Tokens*, 2024.
    """

    def forward(
        self, hidden: Tensor, angles: Angles, batch: Batch, state: LayerState, added: Tensor | None = None
    ) -> Tensor:
        hidden = super().forward(hidden, angles, batch, state)
        return hidden if added is None else hidden + added

    if TYPE_CHECKING:
        __call__ = forward


class VisualDecoder(Decoder):
    """A decoder with embeddings of an encoder among its tokens, and positions along three axes.

    The batch's ``embeddings`` have the width of the model once, and then once for each of the first layers to whose
    outputs a part is added.
    """

    def embed(self, batch: Any) -> Tensor:
        hidden = super().embed(batch)
        return torch.where(batch.embedded[:, None], batch.embeddings[:, : hidden.shape[1]], hidden)

    def positions(self, batch: Any) -> Tensor:
        positions: Tensor = batch.axis_positions
        return positions

    def further(self, batch: Any, embeddings: Tensor) -> Sequence[tuple[Tensor, ...]]:
        width = embeddings.shape[1]
        levels = batch.embeddings.shape[1] // width
        added = [(batch.embeddings[:, level * width : (level + 1) * width],) for level in range(1, levels)]
        return [*added, *[()] * len(self.layers)][: len(self.layers)]


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


class VisualLM(DecoderLM):
    """A text model and a tower. A family assembles both and calls :meth:`attach`."""

    decoder = VisualDecoder
    other_names = MappingProxyType({"model.language_model.": "model.", "model.visual.": "visual."})
    visual: Tower
    config: VisualConfig

    def attach(self, tower: Tower, part: int, config: Mapping[str, Any]) -> Self:
        """Add the tower, and return the model.

        Args:
            tower: the tower.
            part: the width of a part of its embeddings.
            config: the content of config.json.

        Raises:
            ConfigError: config.json names no placeholders.
            ValueError: the tower does not fit the text model.
        """
        width = self.model.embed_tokens.weight.shape[1]
        if part != width:
            raise ValueError(f"the tower's out_hidden_size is {part}, not the text model's hidden_size, {width}")
        self.visual, self.config = tower, VisualConfig.from_config(config)
        self.batch_type = embedding_batch(AxesBatch, tower.width, torch.float32)
        return self

    @property
    def encoder(self) -> Encoder:
        return self.visual

    def expand(self, tokens: Sequence[int], items: Sequence[EncoderItem]) -> list[int]:
        kinds, sizes = [each.kind for each in items], list(map(self.visual.rows, items))
        return expanded(tokens, kinds, sizes, self.config.placeholders)

    def finish_loading(self, backend: Any, checkpoint: Any) -> None:
        """Declare the embeddings in the dtype of the weights."""
        self.batch_type = embedding_batch(AxesBatch, self.visual.width, self.model.embed_tokens.weight.dtype)


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
