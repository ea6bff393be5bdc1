"""Qwen2-MoE: experts of which each token takes some, and a shared one, scaled by a gate, that every token takes.

Source: Yang et al., *Qwen2 Technical Report*, 2024.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Self

import attrs
from attrs.validators import deep_iterable, ge
from torch import nn

from hal.nn import (
    DecoderConfig,
    DecoderLayer,
    DecoderLM,
    GatedMLP,
    RotaryEmbedding,
    Router,
    SelfAttention,
    SparseMLP,
    WindowConfig,
)


@attrs.frozen(kw_only=True, slots=False)  # so that a class can have another base with keys
class ExpertConfig(DecoderConfig):
    """The decoder's keys, those of the experts, and those that select the sparse layers.

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

    def mlp(self, layer: int, **options: Any) -> nn.Module:
        """Return the MLP of a layer, dense or sparse. The options are those of :class:`SparseMLP`."""
        if not self.num_experts or layer in self.mlp_only_layers or (layer + 1) % self.decoder_sparse_step:
            return GatedMLP(self.hidden_size, self.intermediate_size, activation=self.hidden_act)
        numbers = self.num_experts, self.num_experts_per_tok
        router = Router(self.hidden_size, *numbers, renormalize=self.norm_topk_prob)
        return SparseMLP(router, self.moe_intermediate_size, activation=self.hidden_act, **self.shared(), **options)

    def shared(self) -> dict[str, Any]:
        """Return the options of :class:`SparseMLP` for experts that every token takes."""
        return {}


@attrs.frozen(kw_only=True, slots=False)
class SharedExpertConfig(ExpertConfig):
    """The keys of the experts, and of the one that every token takes."""

    shared_expert_intermediate_size: int = attrs.field(default=5632, validator=ge(1))

    def shared(self) -> dict[str, Any]:
        expert = GatedMLP(self.hidden_size, self.shared_expert_intermediate_size, activation=self.hidden_act)
        return {"shared_experts": expert, "shared_gate": True}


@attrs.frozen(kw_only=True)
class Qwen2MoeConfig(SharedExpertConfig, WindowConfig):
    """Without ``layer_types``, every other layer has a window, from the first."""

    num_experts: int = attrs.field(default=60, validator=ge(1))
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = attrs.field(default=1408, validator=ge(1))
    qkv_bias: bool = True

    def slides(self, layer: int) -> bool:
        return layer % 2 == 0 and layer < self.max_window_layers


class Qwen2MoeForCausalLM(DecoderLM):
    other_names = MappingProxyType({".shared_expert.": ".shared_experts."})

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        moe = Qwen2MoeConfig.from_config(config)
        rotary = RotaryEmbedding(moe.head_dim, moe.rope)

        def layer(index: int) -> DecoderLayer:
            attention = SelfAttention(moe, rotary, window=moe.window(index), bias=(moe.qkv_bias, False))
            return DecoderLayer(moe, attention, moe.mlp(index))

        return cls(moe, map(layer, range(moe.num_hidden_layers)))
