"""Qwen3: a decoder with grouped-query attention and a norm on every query and key head.

Source: Qwen Team, *Qwen3 Technical Report*, 2025.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs
from attrs.validators import ge
from torch import Tensor, nn

from hal import ops
from hal.config import read_model_config
from hal.nn import Attention, Batch, CausalLM, Embedding, Linear, MergedLinear, RMSNorm, RopeParameters, RotaryEmbedding

LayerType = Literal["full_attention", "sliding_attention"]


@attrs.frozen
class Qwen3Config:
    """The keys of config.json that decide what is computed."""

    vocab_size: int = attrs.field(validator=ge(1))
    hidden_size: int = attrs.field(validator=ge(1))
    intermediate_size: int = attrs.field(validator=ge(1))
    num_hidden_layers: int = attrs.field(validator=ge(1))
    num_attention_heads: int = attrs.field(validator=ge(1))
    num_key_value_heads: int = attrs.field(validator=ge(1))
    max_position_embeddings: int = attrs.field(validator=ge(1))
    head_dim: int = attrs.field(default=128)
    rms_norm_eps: float = attrs.field(default=1e-6, validator=ge(0.0))
    hidden_act: Literal["silu"] = "silu"
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    rope: RopeParameters = attrs.field(factory=RopeParameters)
    use_sliding_window: bool = False
    sliding_window: int | None = attrs.field(default=4096)
    max_window_layers: int = 28
    layer_types: tuple[LayerType, ...] | None = attrs.field(default=None)

    @sliding_window.validator
    def _at_least_itself(self, attribute: Any, value: int | None) -> None:
        if value is not None and value < 1:
            raise ValueError(f"sliding_window is {value}; a token sees at least itself")

    @head_dim.validator
    def _two_halves(self, attribute: Any, value: int) -> None:
        if value < 1 or value % 2:
            raise ValueError(f"head_dim is {value}; the rotary embedding needs two halves of it")

    @num_key_value_heads.validator
    def _whole_groups(self, attribute: Any, value: int) -> None:
        if self.num_attention_heads % value:
            raise ValueError(
                f"num_attention_heads, {self.num_attention_heads}, is no multiple of {attribute.name}, {value}"
            )

    @layer_types.validator
    def _one_type_a_layer(self, attribute: Any, value: tuple[LayerType, ...] | None) -> None:
        if value is not None and len(value) != self.num_hidden_layers:
            raise ValueError(f"layer_types has {len(value)} entries for {self.num_hidden_layers} layers")

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer, or None."""
        if not self.use_sliding_window:
            return None
        slides = layer >= self.max_window_layers
        if self.layer_types is not None:
            slides = self.layer_types[layer] == "sliding_attention"
        return self.sliding_window if slides else None


class Qwen3Attention(nn.Module):
    def __init__(self, config: Qwen3Config, layer: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.sizes = [self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim]
        parts = dict(zip(("q_proj", "k_proj", "v_proj"), self.sizes, strict=True))
        self.qkv_proj = MergedLinear(config.hidden_size, parts, bias=config.attention_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.attention = Attention(config.head_dim, sliding_window=config.window(layer))
        self.o_proj = Linear(self.sizes[0], config.hidden_size, bias=config.attention_bias)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, batch: Batch, cache: tuple[Tensor, Tensor]) -> Tensor:
        query, key, value = self.qkv_proj(hidden).split(self.sizes, dim=-1)
        query = self.q_norm(query.view(-1, self.heads, self.head_dim))
        key = self.k_norm(key.view(-1, self.kv_heads, self.head_dim))
        query, key = ops.rotary_embedding(query, key, cos, sin)
        value = value.view(-1, self.kv_heads, self.head_dim)
        return self.o_proj(self.attention(query, key, value, batch, cache))


class Qwen3MLP(nn.Module):
    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        parts = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
        self.gate_up_proj = MergedLinear(config.hidden_size, parts)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(ops.silu_and_mul(self.gate_up_proj(hidden)))


class Qwen3DecoderLayer(nn.Module):
    def __init__(self, config: Qwen3Config, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Qwen3Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Qwen3MLP(config)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, batch: Batch, cache: tuple[Tensor, Tensor]) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin, batch, cache)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Qwen3Model(nn.Module):
    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.rotary = RotaryEmbedding(config.head_dim, config.rope)
        self.layers = nn.ModuleList(Qwen3DecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, batch: Batch, caches: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        hidden = self.embed_tokens(batch.token_ids)
        cos, sin = self.rotary(batch.positions, hidden.dtype)
        for layer, cache in zip(self.layers, caches, strict=True):
            hidden = layer(hidden, cos, sin, batch, cache)
        return self.norm(hidden)


class Qwen3ForCausalLM(CausalLM):
    """Qwen3 with its output projection, which may be the embedding's table."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.vocab_size, self.max_length = config.vocab_size, config.max_position_embeddings
        self.num_layers, self.num_kv_heads = config.num_hidden_layers, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.model = Qwen3Model(config)
        if config.tie_word_embeddings:
            self.tied = {"lm_head.weight": "model.embed_tokens.weight"}
        else:
            self.lm_head = Linear(config.hidden_size, config.vocab_size)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Qwen3ForCausalLM:
        rope = RopeParameters.from_config(config)
        return cls(attrs.evolve(read_model_config(Qwen3Config, config), rope=rope))

    def forward(self, batch: Batch, caches: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        hidden = self.model(batch, caches)[batch.logits_indices]
        return self.model.embed_tokens.as_linear(hidden) if self.tied else self.lm_head(hidden)
