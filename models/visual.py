"""What families that read images and videos share: the decoder among whose tokens embeddings are, and positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import attrs
import torch
from torch import Tensor

from hal.config import read_model_config
from hal.nn import (
    Angles,
    Decoder,
    DecoderLayer,
    DecoderLM,
    Encoder,
    EncoderItem,
    LayerState,
    Placement,
    frames,
    place_blocks,
)
from hal.nn.encoder import IMAGE, VIDEO, expanded
from hal.step import AxesBatch, AxesSlotBatch, Batch, SlotBatch, embedding_batch

from .tower import Tower


@attrs.frozen(kw_only=True)
class VisualConfig:
    """The keys of config.json beside those of the text model and of the tower.

    Attributes:
        image_token_id: the placeholder of an image's embedding in a prompt.
        video_token_id: that of a video's.
        vision_start_token_id: the token before the embeddings of a frame.
        vision_end_token_id: that behind them.
    """

    image_token_id: int
    video_token_id: int
    vision_start_token_id: int | None = None
    vision_end_token_id: int | None = None

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
        width = self.model.embed_tokens.width
        if part != width:
            raise ValueError(f"the tower's out_hidden_size is {part}, not the text model's hidden_size, {width}")
        self.visual, self.config = tower, VisualConfig.from_config(config)
        self._base = AxesSlotBatch if issubclass(self.batch_type, SlotBatch) else AxesBatch
        self.batch_type = embedding_batch(self._base, tower.width, torch.float32)
        return self

    @property
    def encoder(self) -> Encoder:
        return self.visual

    @property
    def placeholders(self) -> Mapping[int, str]:
        return self.config.placeholders

    def expand(
        self, tokens: Sequence[int], items: Sequence[EncoderItem], encode: Callable[[str], Sequence[int]] | None = None
    ) -> list[int]:
        parts = [self.tokens_of(each, encode) for each in items]
        return expanded(tokens, [each.kind for each in items], parts, self.placeholders)

    def tokens_of(self, item: EncoderItem, encode: Callable[[str], Sequence[int]] | None) -> list[int]:
        """Return the tokens that replace an item's placeholder: a frame of a video follows its time, as text.

        Args:
            item: the item.
            encode: returns the tokens of a text; None leaves the times out.
        """
        kinds = {kind: token for token, kind in self.placeholders.items()}
        rows = [kinds[item.kind]] * self.visual.rows(item)
        if item.kind != VIDEO or item.times is None or encode is None:
            return rows
        start, end = (
            [] if each is None else [each]
            for each in (self.config.vision_start_token_id, self.config.vision_end_token_id)
        )
        rows = rows[: len(rows) // len(item.times)]
        return [token for time in item.times for token in (*encode(f"<{time:.1f} seconds>"), *start, *rows, *end)]

    def place(self, tokens: Sequence[int], items: Sequence[EncoderItem]) -> Placement:
        return place_blocks(tokens, list(frames(items, self.visual.merge)), self.placeholders)

    def finish_loading(self, backend: Any, checkpoint: Any) -> None:
        """Declare the embeddings in the dtype of the weights."""
        self.batch_type = embedding_batch(self._base, self.visual.width, self.model.embed_tokens.dtype)
