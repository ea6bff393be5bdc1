"""(d) Three rows of positions, and embeddings of images instead of some tokens, as fields of the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from hal import ops
from hal.nn import Linear
from hal.nn.model import LayerState
from hal.step import Batch, field

from .model import AttentionLayer, ToyLM

PATCH = 12
"""Elements of an image's embedding, before the model projects it."""


def _no_image(batch: Batch) -> Tensor:
    return torch.zeros(batch.num_tokens, PATCH, device=batch.token_ids.device)


def _nowhere(batch: Batch) -> Tensor:
    return torch.zeros(batch.num_tokens, dtype=torch.bool, device=batch.token_ids.device)


def _as_text(batch: Batch) -> Tensor:
    return batch.positions.expand(3, -1)


@attrs.frozen(eq=False)
class PictureBatch(Batch):
    """A batch whose tokens have three positions each, in time, height and width, and may be parts of images."""

    rows_of_positions: Tensor = field("3 tokens", torch.int64, default=_as_text)
    image_embeddings: Tensor = field(f"tokens {PATCH}", torch.float32, default=_no_image)
    is_image: Tensor = field("tokens", torch.bool, default=_nowhere)


class PictureLayer(AttentionLayer):
    """Attention whose queries and keys are rotated."""

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, batch: PictureBatch, state: LayerState) -> Tensor:
        query, key, value = self.qkv(self.norm(hidden)).view(-1, 3, self.heads, self.head_dim).unbind(1)
        query, key = ops.rotary_embedding(query, key, cos, sin)
        return hidden + self.out(self.attention(query, key, value, batch, state))


class PicturesForCausalLM(ToyLM):
    batch_type = PictureBatch

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        width, heads = config["hidden_size"], config["num_attention_heads"]
        self.patch = Linear(PATCH, width)
        self.half = width // heads // 2

    def layer(self, index: int, width: int, heads: int) -> PictureLayer:
        return PictureLayer(width, heads)

    def forward(self, batch: PictureBatch, states: Sequence[LayerState]) -> Tensor:
        text = self.embed_tokens(batch.token_ids)
        seen = self.patch(batch.image_embeddings.to(text.dtype))
        hidden = torch.where(batch.is_image[:, None], seen, text)
        rates = 100.0 ** (-torch.arange(self.half, device=text.device) / self.half)
        # Every third frequency uses another row of positions.
        row = torch.arange(self.half, device=text.device) % 3
        angles = (batch.rows_of_positions.float()[row] * rates[:, None]).t().repeat(1, 2)
        cos, sin = angles.cos().to(text.dtype), angles.sin().to(text.dtype)
        for layer, state in zip(self.layers, states, strict=True):
            hidden = layer(hidden, cos, sin, batch, state)
        return hidden
