"""(d) Three rows of positions, and embeddings of images instead of some tokens, as fields of the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from hal import ops
from hal.nn import Attention, Batch, CausalLM, Embedding, Linear, RMSNorm
from hal.nn.model import LayerState
from hal.step import field

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


class PictureLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, width // heads
        self.norm, self.qkv, self.out = RMSNorm(width, 1e-6), Linear(width, 3 * width), Linear(width, width)
        self.attention = Attention(heads, self.head_dim)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, batch: PictureBatch, state: LayerState) -> Tensor:
        query, key, value = self.qkv(self.norm(hidden)).view(-1, 3, self.heads, self.head_dim).unbind(1)
        query, key = ops.rotary_embedding(query, key, cos, sin)
        return hidden + self.out(self.attention(query, key, value, batch, state))


class PicturesForCausalLM(CausalLM):
    batch_type = PictureBatch

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.vocab_size, self.max_length = config["vocab_size"], 256
        width, heads = config["hidden_size"], config["num_attention_heads"]
        self.embed_tokens, self.lm_head = Embedding(self.vocab_size, width), Linear(width, self.vocab_size)
        self.patch = Linear(PATCH, width)
        layers = [PictureLayer(width, heads) for _ in range(config["num_hidden_layers"])]
        self.layers = nn.ModuleList(layers)
        self.half = width // heads // 2
        self.states = [layer.attention.states for layer in layers]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> PicturesForCausalLM:
        return cls(config)

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
        logits: Tensor = self.lm_head(hidden[batch.logits_indices])
        return logits
