"""What the toy models share: a layer of attention, and a model of an embedding, layers and a projection to logits."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Self

from torch import Tensor, nn

from hal.nn import Attention, CausalLM, Embedding, Linear, RMSNorm
from hal.nn.model import LayerState
from hal.step import Batch


class AttentionLayer(nn.Module):
    """Attention over all tokens, without positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, width // heads
        self.norm, self.qkv, self.out = RMSNorm(width, 1e-6), Linear(width, 3 * width), Linear(width, width)
        self.attention = Attention(heads, self.head_dim)
        self.states = self.attention.states

    def forward(self, hidden: Tensor, batch: Batch, state: LayerState) -> Tensor:
        heads = self.qkv(self.norm(hidden)).view(-1, 3, self.heads, self.head_dim)
        query, key, value = heads.unbind(1)
        return hidden + self.out(self.attention(query, key, value, batch, state))


class ToyLM(CausalLM):
    """A model whose layers take the hidden states, the batch and their state."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.vocab_size, self.max_length = config["vocab_size"], 256
        width, heads = config["hidden_size"], config["num_attention_heads"]
        self.embed_tokens, self.lm_head = Embedding(self.vocab_size, width), Linear(width, self.vocab_size)
        layers = [self.layer(index, width, heads) for index in range(config["num_hidden_layers"])]
        self.layers = nn.ModuleList(layers)
        self.states = [layer.states for layer in layers]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(config)

    @abstractmethod
    def layer(self, index: int, width: int, heads: int) -> Any:
        """Return a layer, which has its ``states``."""

    def forward(self, batch: Batch, states: Sequence[LayerState]) -> Tensor:
        hidden = self.embed_tokens(batch.token_ids)
        for layer, state in zip(self.layers, states, strict=True):
            hidden = layer(hidden, batch, state)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)
