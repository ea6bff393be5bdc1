"""ERNIE 4.5, dense or with a mixture of experts: adjacent pairs of elements are rotated, with float32 angles.

Source: Baidu ERNIE Team, *ERNIE 4.5 Technical Report*, 2025.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Self

import attrs
import torch
from attrs.validators import ge, le
from torch import nn

from hal.nn import DecoderConfig, DecoderLayer, DecoderLM, GatedMLP, RotaryEmbedding, Router, SelfAttention, SparseMLP


@attrs.frozen(kw_only=True)
class ErnieConfig(DecoderConfig):
    """The decoder's keys, and whether projections have biases."""

    rms_norm_eps: float = attrs.field(default=1e-5, validator=[ge(0.0), le(1.0)])
    tie_word_embeddings: bool = True
    use_bias: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any], layer_type: str | None = None) -> Self:
        """Read a checkpoint's config.json. Without ``rope_theta``, it is 500,000."""
        return super().from_config(cls.with_defaults(config, rope_theta=5e5), layer_type)

    def mlp(self, width: int) -> GatedMLP:
        """Return a dense MLP, or shared experts."""
        return GatedMLP(self.hidden_size, width, activation=self.hidden_act, bias=self.use_bias)


@attrs.frozen(kw_only=True)
class ErnieMoeConfig(ErnieConfig):
    """The keys of the experts, and those that select sparse layers; an end of -1 is the last layer."""

    moe_num_experts: int = attrs.field(default=64, validator=ge(1))
    moe_k: int = 6
    moe_intermediate_size: int = attrs.field(default=1536, validator=ge(1))
    moe_num_shared_experts: int = attrs.field(default=2, validator=ge(0))
    moe_layer_start_index: int = 1
    moe_layer_end_index: int = attrs.field(default=-1, validator=ge(-1))
    moe_layer_interval: int = attrs.field(default=1, validator=ge(1))
    moe_norm_min: float = attrs.field(default=1e-12, validator=[ge(0.0), le(1e-6)])  # chosen scores add up to more

    def mlp_of(self, layer: int) -> nn.Module:
        """Return the MLP of a layer, dense or sparse."""
        end = self.num_hidden_layers if self.moe_layer_end_index == -1 else self.moe_layer_end_index
        if not self.moe_layer_start_index <= layer <= end or (layer + 1) % self.moe_layer_interval:
            return self.mlp(self.intermediate_size)
        numbers, width = (self.moe_num_experts, self.moe_k), self.moe_intermediate_size
        router = Router(self.hidden_size, *numbers, renormalize=True, correction=True, dtype=torch.float32)
        router.e_score_correction_bias = nn.Parameter(torch.empty(1, numbers[0]), requires_grad=False)
        shared = self.mlp(width * self.moe_num_shared_experts) if self.moe_num_shared_experts else None
        return SparseMLP(router, width, shared_experts=shared, activation=self.hidden_act)


class ErnieForCausalLM(DecoderLM):
    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        ernie = ErnieConfig.from_config({"head_dim": 128, **config})
        return cls.assemble(ernie, lambda layer: ernie.mlp(ernie.intermediate_size))

    @classmethod
    def assemble(cls, ernie: ErnieConfig, mlp: Callable[[int], nn.Module], *, head_bias: bool = False) -> Self:
        """Return a model with the MLPs that ``mlp`` makes."""
        rotary = RotaryEmbedding(ernie.head_dim, ernie.rope, interleaved=True, dtype=torch.float32)

        def layer(index: int) -> DecoderLayer:
            attention = SelfAttention(ernie, rotary, bias=(ernie.use_bias, ernie.use_bias))
            return DecoderLayer(ernie, attention, mlp(index))

        return cls(ernie, map(layer, range(ernie.num_hidden_layers)), head_bias=head_bias)


class ErnieMoeForCausalLM(ErnieForCausalLM):
    other_names = MappingProxyType({".mlp.moe_statics.": ".mlp.gate.", ".gate.moe_statics.": ".gate."})
    ignored_prefixes = ("model.mtp_", "mtp")

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        ernie = ErnieMoeConfig.from_config(config)
        return cls.assemble(ernie, ernie.mlp_of, head_bias=ernie.use_bias)
