"""DeepSeek-V2 and V3: latent attention; dense layers, then layers of experts with shared ones.

V3's architecture is also that of DeepSeek-R1 and V3.1, and of Kimi-K2.

Source: DeepSeek-AI, *DeepSeek-V2*, 2024, and *DeepSeek-V3 Technical Report*, 2024.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Literal, Self

import attrs
import torch
from attrs.validators import ge, le
from torch import nn

from hal.nn import DecoderLayer, DecoderLM, GatedMLP, LatentAttention, LatentConfig, Mixer, Router, SparseMLP


@attrs.frozen(kw_only=True)
class DeepseekConfig(LatentConfig):
    """The keys of latent attention, and those of the experts. The first ``first_k_dense_replace`` layers are dense."""

    expert_names: ClassVar[tuple[str, str, str]] = ("gate_proj", "up_proj", "down_proj")
    moe_intermediate_size: int = attrs.field(validator=ge(1))
    n_routed_experts: int = attrs.field(validator=ge(1))
    n_shared_experts: int = attrs.field(validator=ge(1))
    num_experts_per_tok: int
    first_k_dense_replace: int = attrs.field(default=0, validator=ge(0))
    moe_layer_freq: Literal[1] = 1
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = attrs.field(default=1.0, validator=[ge(2.0**-16), le(2.0**16)])
    # Layers that predict further tokens, which the model does not compute.
    num_nextn_predict_layers: int = attrs.field(default=0, validator=[ge(0), le(64)])

    @classmethod
    def from_config(cls, config: Mapping[str, Any], layer_type: str | None = None) -> Self:
        """Read a checkpoint's config.json, whose ``num_mtp_layers`` is another name of version 5 of transformers."""
        given = dict(config)
        if "num_mtp_layers" in given and "num_nextn_predict_layers" not in given:
            given["num_nextn_predict_layers"] = given.pop("num_mtp_layers")
        return super().from_config(given, layer_type)

    @property
    def routing(self) -> dict[str, Any]:
        """The options of the router."""
        return {}

    @property
    def activation(self) -> Any:
        """The activation of the MLPs and the experts."""
        return self.hidden_act

    def mixer(self, layer: int, rotary: Any) -> Mixer:
        """Return the attention of a layer, whose rotary embedding layers share."""
        return LatentAttention(self, rotary)

    def layer(self, layer: int, rotary: Any) -> DecoderLayer:
        """Return a layer, whose rotary embedding layers share."""
        return DecoderLayer(self, self.mixer(layer, rotary), self.mlp(layer))

    def mlp(self, layer: int) -> nn.Module:
        """Return the MLP of a layer, dense or sparse."""
        width, act = self.moe_intermediate_size, self.activation
        dense = partial(GatedMLP, self.hidden_size, activation=act)
        if self.dense(layer):
            return dense(self.intermediate_size)
        how = {"scale": self.routed_scaling_factor, "dtype": torch.float32, "wide_weights": True, **self.routing}
        router = Router(self.hidden_size, self.n_routed_experts, self.num_experts_per_tok, **how)
        shared = dense(width * self.n_shared_experts)
        return SparseMLP(router, width, shared_experts=shared, names=self.expert_names, activation=act)

    def dense(self, layer: int) -> bool:
        """Return whether a layer has no experts."""
        return layer < self.first_k_dense_replace


@attrs.frozen(kw_only=True)
class DeepseekV2Config(DeepseekConfig):
    """The keys of V2's routing: the softmax of scores, and groups by their best expert."""

    scoring_func: Literal["softmax"] = "softmax"
    topk_method: Literal["greedy", "group_limited_greedy"] = "greedy"
    norm_topk_prob: Literal[False] = False
    rope_interleave: Literal[True] = True
    mlp_bias: Literal[False] = False

    @property
    def routing(self) -> dict[str, Any]:
        groups = (1, 1) if self.topk_method == "greedy" else (self.n_group, self.topk_group)
        return {"renormalize": False, "groups": groups, "group_best": 1}


@attrs.frozen(kw_only=True)
class DeepseekV3Config(DeepseekConfig):
    """The keys of V3's routing: the sigmoid of scores, a bias for the choice, and groups by their two best experts."""

    first_k_dense_replace: int = attrs.field(default=3, validator=ge(0))
    n_group: int = 8
    topk_group: int = 4
    routed_scaling_factor: float = attrs.field(default=2.5, validator=[ge(2.0**-16), le(2.0**16)])
    num_nextn_predict_layers: int = attrs.field(default=1, validator=[ge(0), le(64)])
    scoring_func: Literal["sigmoid"] = "sigmoid"
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    norm_topk_prob: bool = True

    @property
    def routing(self) -> dict[str, Any]:
        groups = self.n_group, self.topk_group
        return {"renormalize": self.norm_topk_prob, "groups": groups, "sigmoid": True, "correction": True}


class DeepseekV2ForCausalLM(DecoderLM):
    config_type: ClassVar[type[DeepseekConfig]] = DeepseekV2Config

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        deepseek = cls.config_type.from_config(config)
        rotary, numbers = deepseek.rotary(), range(deepseek.num_hidden_layers)
        layers = (deepseek.layer(each, rotary) for each in numbers)
        return cls(deepseek, layers, ignored_layers=deepseek.num_nextn_predict_layers)


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    config_type = DeepseekV3Config
