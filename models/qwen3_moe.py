"""Qwen3-MoE: Qwen3's attention, and a mixture of experts in place of the MLP of most layers.

Source: Qwen Team, *Qwen3 Technical Report*, 2025.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Self

import attrs
from attrs.validators import ge

from hal.nn import DecoderLayer, DecoderLM, RMSNorm, RotaryEmbedding, SelfAttention, WindowConfig

from .qwen2_moe import ExpertConfig


@attrs.frozen(kw_only=True)
class Qwen3MoeConfig(ExpertConfig, WindowConfig):
    """All layers have the same sliding window, or none, whatever ``max_window_layers`` is."""

    num_experts: int = attrs.field(default=128, validator=ge(1))
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = attrs.field(default=768, validator=ge(1))

    def slides(self, layer: int) -> bool:
        return True


class Qwen3MoeForCausalLM(DecoderLM):
    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        moe = Qwen3MoeConfig.from_config(config)
        rotary, norm = RotaryEmbedding(moe.head_dim, moe.rope), partial(RMSNorm, eps=moe.rms_norm_eps)

        def layer(index: int) -> DecoderLayer:
            attention = SelfAttention(moe, rotary, window=moe.window(index), norm=norm)
            return DecoderLayer(moe, attention, moe.mlp(index))

        return cls(moe, map(layer, range(moe.num_hidden_layers)))
