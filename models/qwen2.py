"""Qwen2 and Qwen2.5: a decoder with biases of query, key and value, and perhaps a window in its last layers.

Source: Yang et al., *Qwen2 Technical Report*, 2024.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import attrs

from hal.nn import DecoderLayer, DecoderLM, GatedMLP, RotaryEmbedding, SelfAttention, WindowConfig


@attrs.frozen(kw_only=True)
class Qwen2Config(WindowConfig):
    """The decoder's keys, and those that select layers with a window."""


class Qwen2ForCausalLM(DecoderLM):
    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        qwen2 = Qwen2Config.from_config(config)
        rotary = RotaryEmbedding(qwen2.head_dim, qwen2.rope)

        def layer(index: int) -> DecoderLayer:
            attention = SelfAttention(qwen2, rotary, window=qwen2.window(index), bias=(True, False))
            mlp = GatedMLP(qwen2.hidden_size, qwen2.intermediate_size, activation=qwen2.hidden_act)
            return DecoderLayer(qwen2, attention, mlp)

        return cls(qwen2, map(layer, range(qwen2.num_hidden_layers)))
