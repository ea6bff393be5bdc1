"""Qwen2-MoE: experts of which each token takes some, and a shared one, scaled by a gate, that every token takes.

Source: Yang et al., *Qwen2 Technical Report*, 2024.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import attrs
from attrs.validators import deep_iterable, ge
from torch import Tensor, nn

from hal.nn import DecoderConfig, DecoderLayer, DecoderLM, Gate, GatedMLP, SelfAttention, SparseMLP, check_window

from .qwen3 import LayerType, check_layer_types


@attrs.frozen(kw_only=True)
class QwenMoeConfig(DecoderConfig):
    """The decoder's keys, those of the experts, and those that select the sparse layers and the layers with a window.

    Layers are sparse at every ``decoder_sparse_step``-th place, except ``mlp_only_layers``.
    """

    num_experts: int = attrs.field(validator=ge(1))
    num_experts_per_tok: int
    moe_intermediate_size: int = attrs.field(validator=ge(1))
    norm_topk_prob: bool = False
    mlp_only_layers: tuple[int, ...] = attrs.field(default=(), validator=deep_iterable(ge(0)))
    decoder_sparse_step: int = attrs.field(default=1, validator=ge(1))
    use_sliding_window: bool = False
    sliding_window: int | None = attrs.field(default=4096, validator=check_window)
    max_window_layers: int = 28

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read a checkpoint's config.json.

        Version 5 of transformers writes num_experts as num_local_experts, and 0 for a sliding window that is not used.
        """
        given = dict(config)
        if given.get("sliding_window") == 0 and not given.get("use_sliding_window"):
            del given["sliding_window"]
        if "num_local_experts" in given:
            given.setdefault("num_experts", given.pop("num_local_experts"))
        return super().from_config(given)

    def mlp(self, layer: int) -> nn.Module | None:
        """Return the MLP of a dense layer, or None for a sparse one."""
        if layer in self.mlp_only_layers or (layer + 1) % self.decoder_sparse_step:
            return GatedMLP(self.hidden_size, self.intermediate_size)
        return None


@attrs.frozen(kw_only=True)
class Qwen2MoeConfig(QwenMoeConfig):
    """The keys of the shared expert. Without ``layer_types``, every other layer has a window, from the first."""

    num_experts: int = attrs.field(default=60, validator=ge(1))
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = attrs.field(default=1408, validator=ge(1))
    shared_expert_intermediate_size: int = attrs.field(default=5632, validator=ge(1))
    qkv_bias: bool = True
    layer_types: tuple[LayerType, ...] | None = attrs.field(default=None, validator=check_layer_types)

    def window(self, layer: int) -> int | None:
        """Return the sliding window of a layer, or None."""
        if not self.use_sliding_window:
            return None
        slides = layer % 2 == 0 and layer < self.max_window_layers
        if self.layer_types is not None:
            slides = self.layer_types[layer] == "sliding_attention"
        return self.sliding_window if slides else None


class Qwen2MoeMLP(SparseMLP):
    """The experts, and the shared one, which the sigmoid of a gate scales."""

    def __init__(self, config: Qwen2MoeConfig) -> None:
        super().__init__(
            config.hidden_size,
            config.moe_intermediate_size,
            config.num_experts,
            config.num_experts_per_tok,
            renormalize=config.norm_topk_prob,
        )
        self.shared_expert = GatedMLP(config.hidden_size, config.shared_expert_intermediate_size)
        self.shared_expert_gate = Gate(config.hidden_size, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        shared = self.shared_expert_gate(hidden).sigmoid() * self.shared_expert(hidden)
        return super().forward(hidden) + shared


class Qwen2MoeLayer(DecoderLayer):
    def __init__(self, config: Qwen2MoeConfig, layer: int) -> None:
        attention = SelfAttention(config, sliding_window=config.window(layer), bias=(config.qkv_bias, False))
        super().__init__(config, attention, config.mlp(layer) or Qwen2MoeMLP(config))


class Qwen2MoeForCausalLM(DecoderLM):
    def __init__(self, config: Qwen2MoeConfig) -> None:
        super().__init__(config, [Qwen2MoeLayer(config, layer) for layer in range(config.num_hidden_layers)])

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Qwen2MoeForCausalLM:
        return cls(Qwen2MoeConfig.from_config(config))
