"""Llama, and Mistral, which adds a sliding window.

Source: Grattafiori et al., *The Llama 3 Herd of Models*, 2024; Jiang et al., *Mistral 7B*, 2023.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

import attrs

from hal.nn import DecoderConfig, DecoderLayer, DecoderLM, GatedMLP, RotaryEmbedding, SelfAttention, check_window


@attrs.frozen(kw_only=True)
class LlamaConfig(DecoderConfig):
    """The keys of Llama's config.json."""

    mlp_bias: bool = False
    rope_interleaved: Literal[False] = False  # in SmolLM's files


@attrs.frozen(kw_only=True)
class MistralConfig(LlamaConfig):
    """Llama's keys, and the sliding window of all layers."""

    sliding_window: int | None = attrs.field(default=4096, validator=check_window)


class LlamaForCausalLM(DecoderLM):
    # transformers' class runs EXAONE too, by other names of tensors.
    model_types = ("llama", "internlm3", "iquestcoder")
    # Checkpoints of Llama 1 and 2 store the frequencies of each layer, which the config determines.
    ignored = (".rotary_emb.inv_freq",)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls.assemble(LlamaConfig.from_config(config), window=None)

    @classmethod
    def assemble(cls, config: LlamaConfig, window: int | None) -> Self:
        rotary = RotaryEmbedding(config.head_dim, config.rope)

        def layer() -> DecoderLayer:
            sizes = config.hidden_size, config.intermediate_size
            mlp = GatedMLP(*sizes, activation=config.hidden_act, bias=config.mlp_bias)
            return DecoderLayer(config, SelfAttention(config, rotary, window=window), mlp)

        return cls(config, (layer() for _ in range(config.num_hidden_layers)))


class MistralForCausalLM(LlamaForCausalLM):
    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        mistral = MistralConfig.from_config(config)
        return cls.assemble(mistral, mistral.sliding_window)
