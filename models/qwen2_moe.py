"""Qwen2-MoE: experts of which each token takes some, and a shared one, scaled by a gate, that every token takes.

Source: Yang et al., *Qwen2 Technical Report*, 2024.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import attrs
from attrs.validators import deep_iterable, ge
from torch import Tensor

from hal.nn import DecoderLayer, DecoderLM, Gate, GatedMLP, RotaryEmbedding, SelfAttention, SparseMLP, WindowConfig


@attrs.frozen(kw_only=True)
class QwenMoeConfig(WindowConfig):
    """The decoder's keys, those of the experts, and those that select the sparse layers and the layers with a window.

    Layers are sparse at every ``decoder_sparse_step``-th place, except ``mlp_only_layers``.
    """

    num_experts: int = attrs.field(validator=ge(1))
    num_experts_per_tok: int
    moe_intermediate_size: int = attrs.field(validator=ge(1))
    norm_topk_prob: bool = False
    mlp_only_layers: tuple[int, ...] = attrs.field(default=(), validator=deep_iterable(ge(0)))
    decoder_sparse_step: int = attrs.field(default=1, validator=ge(1))

    @classmethod
    def from_config(cls, config: Mapping[str, Any], layer_type: str | None = None) -> Self:
        """Read a checkpoint's config.json. Version 5 of transformers writes num_experts as num_local_experts."""
        given = dict(config)
        if "num_local_experts" in given:
            given.setdefault("num_experts", given.pop("num_local_experts"))
        return super().from_config(given, layer_type)

    def mlp(self, layer: int) -> GatedMLP | None:
        """Return the MLP of a dense layer, or None for a sparse one."""
        if layer in self.mlp_only_layers or (layer + 1) % self.decoder_sparse_step:
            return GatedMLP(self.hidden_size, self.intermediate_size, activation=self.hidden_act)
        return None

    def experts(self) -> tuple[int, int, int, int]:
        """Return the sizes of a :class:`SparseMLP`."""
        return self.hidden_size, self.moe_intermediate_size, self.num_experts, self.num_experts_per_tok


@attrs.frozen(kw_only=True)
class Qwen2MoeConfig(QwenMoeConfig):
    """The keys of the shared expert. Without ``layer_types``, every other layer has a window, from the first."""

    num_experts: int = attrs.field(default=60, validator=ge(1))
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = attrs.field(default=1408, validator=ge(1))
    shared_expert_intermediate_size: int = attrs.field(default=5632, validator=ge(1))
    qkv_bias: bool = True

    def slides(self, layer: int) -> bool:
        return layer % 2 == 0 and layer < self.max_window_layers


class Qwen2MoeMLP(SparseMLP):
    """The experts, and the shared one, which the sigmoid of a gate scales."""

    def __init__(self, config: Qwen2MoeConfig) -> None:
        activation = config.hidden_act
        super().__init__(*config.experts(), renormalize=config.norm_topk_prob, activation=activation)
        width = config.shared_expert_intermediate_size
        self.shared_expert = GatedMLP(config.hidden_size, width, activation=activation)
        self.shared_expert_gate = Gate(config.hidden_size, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        shared = self.shared_expert_gate(hidden).sigmoid() * self.shared_expert(hidden)
        return super().forward(hidden) + shared


class Qwen2MoeForCausalLM(DecoderLM):
    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        moe = Qwen2MoeConfig.from_config(config)
        rotary = RotaryEmbedding(moe.head_dim, moe.rope)

        def layer(index: int) -> DecoderLayer:
            attention = SelfAttention(moe, rotary, window=moe.window(index), bias=(moe.qkv_bias, False))
            return DecoderLayer(moe, attention, moe.mlp(index) or Qwen2MoeMLP(moe))

        return cls(moe, map(layer, range(moe.num_hidden_layers)))
