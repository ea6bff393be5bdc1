"""Qwen3-MoE: Qwen3's attention, and a mixture of experts in place of the MLP of most layers.

Source: Qwen Team, *Qwen3 Technical Report*, 2025.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from attrs.validators import ge

from hal.nn import DecoderLayer, DecoderLM, SparseMLP

from .qwen2_moe import QwenMoeConfig
from .qwen3 import Qwen3Attention


@attrs.frozen(kw_only=True)
class Qwen3MoeConfig(QwenMoeConfig):
    """All layers have the same sliding window, or none, whatever ``max_window_layers`` is."""

    num_experts: int = attrs.field(default=128, validator=ge(1))
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = attrs.field(default=768, validator=ge(1))

    def window(self) -> int | None:
        """Return the sliding window, or None."""
        return self.sliding_window if self.use_sliding_window else None


class Qwen3MoeLayer(DecoderLayer):
    def __init__(self, config: Qwen3MoeConfig, layer: int) -> None:
        mlp = config.mlp(layer) or SparseMLP(
            config.hidden_size,
            config.moe_intermediate_size,
            config.num_experts,
            config.num_experts_per_tok,
            renormalize=config.norm_topk_prob,
        )
        super().__init__(config, Qwen3Attention(config, config.window()), mlp)


class Qwen3MoeForCausalLM(DecoderLM):
    def __init__(self, config: Qwen3MoeConfig) -> None:
        super().__init__(config, [Qwen3MoeLayer(config, layer) for layer in range(config.num_hidden_layers)])

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Qwen3MoeForCausalLM:
        return cls(Qwen3MoeConfig.from_config(config))
