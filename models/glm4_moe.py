"""GLM-4.5 and later models with a mixture of experts: dense layers, then experts that a sigmoid router chooses.

Source: GLM-4.5 Team, *GLM-4.5: Agentic, Reasoning, and Coding (ARC) Foundation Models*, 2025.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Self

import attrs
import torch
from attrs.validators import ge, le
from torch import nn

from hal.nn import (
    DecoderConfig,
    DecoderLayer,
    DecoderLM,
    GatedMLP,
    RMSNorm,
    RotaryEmbedding,
    Router,
    SelfAttention,
    SparseMLP,
)


@attrs.frozen(kw_only=True)
class Glm4MoeConfig(DecoderConfig):
    """The decoder's keys, and those of the experts. The first ``first_k_dense_replace`` layers are dense."""

    partial_rotary = True
    rms_norm_eps: float = attrs.field(default=1e-5, validator=[ge(0.0), le(1.0)])
    use_qk_norm: bool = False
    n_routed_experts: int = attrs.field(default=128, validator=ge(1))
    n_shared_experts: int = attrs.field(default=1, validator=ge(1))
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = attrs.field(default=1408, validator=ge(1))
    first_k_dense_replace: int = attrs.field(default=1, validator=ge(0))
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = attrs.field(default=1.0, validator=[ge(2.0**-16), le(2.0**16)])
    # Layers that predict further tokens, which the model does not compute.
    num_nextn_predict_layers: int = attrs.field(default=1, validator=[ge(0), le(64)])

    @classmethod
    def from_config(cls, config: Mapping[str, Any], layer_type: str | None = None) -> Self:
        """Read a checkpoint's config.json. Without ``partial_rotary_factor``, half of each head is rotated."""
        given = cls.with_defaults(config, partial_rotary_factor=0.5)
        if "num_mtp_layers" in given:  # in version 5 of transformers
            given.setdefault("num_nextn_predict_layers", given.pop("num_mtp_layers"))
        return super().from_config(given, layer_type)

    def mlp(self, layer: int) -> nn.Module:
        """Return the MLP of a layer, dense or sparse."""
        dense = partial(GatedMLP, self.hidden_size, activation=self.hidden_act)
        if layer < self.first_k_dense_replace:
            return dense(self.intermediate_size)
        router = Router(
            self.hidden_size,
            self.n_routed_experts,
            self.num_experts_per_tok,
            sigmoid=True,
            renormalize=self.norm_topk_prob,
            scale=self.routed_scaling_factor,
            groups=(self.n_group, self.topk_group),
            correction=True,
            dtype=torch.float32,
            wide_weights=True,
        )
        width = self.moe_intermediate_size
        return SparseMLP(router, width, shared_experts=dense(width * self.n_shared_experts), activation=self.hidden_act)

    def rotary(self) -> RotaryEmbedding:
        """Return the rotary embedding, which layers share."""
        return RotaryEmbedding(self.head_dim, self.rope)

    def layer(self, index: int, rotary: RotaryEmbedding | None) -> DecoderLayer:
        """Return a layer."""
        norm = partial(RMSNorm, eps=self.rms_norm_eps) if self.use_qk_norm else None
        attention = SelfAttention(self, rotary, bias=(self.attention_bias, False), norm=norm)
        return DecoderLayer(self, attention, self.mlp(index))


class Glm4MoeForCausalLM(DecoderLM):
    model_types = ("glm4_moe",)  # transformers' class runs Sarvam's models too, by other names of tensors

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        glm = Glm4MoeConfig.from_config(config)
        rotary = glm.rotary()
        layers = (glm.layer(index, rotary) for index in range(glm.num_hidden_layers))
        return cls(glm, layers, ignored_layers=glm.num_nextn_predict_layers)
