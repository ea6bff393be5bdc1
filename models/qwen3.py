"""Qwen3: a decoder with grouped-query attention and a norm on every query and key head.

Source: Qwen Team, *Qwen3 Technical Report*, 2025.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Self

import attrs

from hal.nn import DecoderLayer, DecoderLM, GatedMLP, RMSNorm, RotaryEmbedding, SelfAttention, WindowConfig


@attrs.frozen(kw_only=True)
class Qwen3Config(WindowConfig):
    """The decoder's keys, and those that select layers with a window."""

    head_dim: int = 128


class Qwen3ForCausalLM(DecoderLM):
    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        qwen3 = Qwen3Config.from_config(config)
        rotary, norm = RotaryEmbedding(qwen3.head_dim, qwen3.rope), partial(RMSNorm, eps=qwen3.rms_norm_eps)

        def layer(index: int) -> DecoderLayer:
            attention = SelfAttention(qwen3, rotary, window=qwen3.window(index), norm=norm)
            mlp = GatedMLP(qwen3.hidden_size, qwen3.intermediate_size, activation=qwen3.hidden_act)
            return DecoderLayer(qwen3, attention, mlp)

        return cls(qwen3, map(layer, range(qwen3.num_hidden_layers)))
