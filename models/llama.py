"""Llama, and Mistral, which adds a sliding window.

Source: Grattafiori et al., *The Llama 3 Herd of Models*, 2024; Jiang et al., *Mistral 7B*, 2023.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from hal.nn import DecoderConfig, DecoderLayer, DecoderLM, GatedMLP, SelfAttention, check_window


@attrs.frozen(kw_only=True)
class LlamaConfig(DecoderConfig):
    """The keys of Llama's config.json."""

    mlp_bias: bool = False


@attrs.frozen(kw_only=True)
class MistralConfig(LlamaConfig):
    """Llama's keys, and the sliding window of all layers."""

    sliding_window: int | None = attrs.field(default=4096, validator=check_window)


class LlamaLayer(DecoderLayer):
    def __init__(self, config: LlamaConfig, sliding_window: int | None) -> None:
        mlp = GatedMLP(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        super().__init__(config, SelfAttention(config, sliding_window=sliding_window), mlp)


class LlamaForCausalLM(DecoderLM):
    # Checkpoints of Llama 1 and 2 store the frequencies of each layer, which the config determines.
    ignored = (".rotary_emb.inv_freq",)

    def __init__(self, config: LlamaConfig, sliding_window: int | None = None) -> None:
        super().__init__(config, [LlamaLayer(config, sliding_window) for _ in range(config.num_hidden_layers)])

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> LlamaForCausalLM:
        return cls(LlamaConfig.from_config(config))


class MistralForCausalLM(LlamaForCausalLM):
    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> MistralForCausalLM:
        mistral = MistralConfig.from_config(config)
        return cls(mistral, mistral.sliding_window)
