"""Kimi-Linear: three layers of Kimi delta attention to one of latent attention without positions, and experts.

Source: Kimi Team, *Kimi Linear: An Expressive, Efficient Attention Architecture*, 2025.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, Self

import attrs
from attrs.validators import ge, le

from hal.nn import FULL, RECURRENT, HybridLayerType, KimiDeltaAttention, LatentAttention, Mixer, check_layer_types
from hal.nn.rope_parameters import SIZE

from .deepseek import DeepseekV2ForCausalLM, DeepseekV3Config

SPELLED = {
    "max_position_embeddings": "model_max_length",
    "n_group": "num_expert_group",
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "norm_topk_prob": "moe_renormalize",
    "num_experts_per_tok": "num_experts_per_token",
    "scoring_func": "moe_router_activation_func",
}
"""The family's spelling of DeepSeek's keys."""
UNREAD = ("rope_parameters", "rope_scaling")
"""Keys without effect, because no part of a head is rotated."""
WIDTH = [ge(2), le(4)]


@attrs.frozen(kw_only=True)
class LinearAttentionTable:
    """The table ``linear_attn_config``, whose lists have the numbers of layers from 1 on."""

    kda_layers: tuple[int, ...]
    full_attn_layers: tuple[int, ...]
    num_heads: int = attrs.field(validator=SIZE)
    head_dim: int = attrs.field(validator=SIZE)
    short_conv_kernel_size: int = attrs.field(default=4, validator=WIDTH)


@attrs.frozen(kw_only=True)
class KimiLinearConfig(DeepseekV3Config):
    """DeepSeek-V3's keys, and those of recurrent layers: version 5 of transformers has other ones than the table."""

    expert_names = ("w1", "w3", "w2")
    unread = ("head_dim",)
    first_k_dense_replace: int = attrs.field(default=1, validator=ge(0))
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = attrs.field(default=2.446, validator=[ge(2.0**-16), le(2.0**16)])
    rms_norm_eps: float = attrs.field(default=1e-5, validator=[ge(0.0), le(1.0)])
    num_nextn_predict_layers: Literal[0] = 0
    tie_word_embeddings: Literal[False] = False
    mla_use_nope: Literal[True] = True
    use_grouped_topk: bool = True  # of the groups that other keys say
    linear_attn_config: LinearAttentionTable | None = None
    linear_num_heads: int = attrs.field(default=32, validator=SIZE)
    linear_head_dim: int = attrs.field(default=128, validator=SIZE)
    linear_conv_kernel_dim: int = attrs.field(default=4, validator=WIDTH)
    layer_types: tuple[HybridLayerType, ...] | None = attrs.field(default=None, validator=check_layer_types)
    mlp_layer_types: tuple[Literal["dense", "sparse"], ...] | None = attrs.field(
        default=None, validator=check_layer_types
    )

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        numbers, table = [*range(1, self.num_hidden_layers + 1)], self.linear_attn_config
        if table is not None and sorted(table.kda_layers + table.full_attn_layers) != numbers:
            raise ValueError(
                f"linear_attn_config has the kda_layers {table.kda_layers} and the full_attn_layers "
                f"{table.full_attn_layers}; each layer from 1 to {numbers[-1]} must be in one of both"
            )

    @classmethod
    def from_config(cls, config: Mapping[str, Any], layer_type: str | None = None) -> Self:
        """Read a checkpoint's config.json."""
        given = {key: value for key, value in config.items() if key not in UNREAD}
        renamed = {key: given.pop(old) for key, old in SPELLED.items() if old in given}
        return super().from_config({**given, **renamed})

    @property
    def types(self) -> tuple[HybridLayerType, ...]:
        """The type of each layer."""
        layers, table = range(self.num_hidden_layers), self.linear_attn_config
        full = [layer for layer in layers if layer and layer % 4 == 0]
        if table is not None:
            full = [each - 1 for each in table.full_attn_layers]
        return self.layer_types or tuple(FULL if layer in full else RECURRENT for layer in layers)

    def mixer(self, layer: int, rotary: Any) -> Mixer:
        if self.types[layer] == FULL:
            return LatentAttention(self, None)
        table = self.linear_attn_config
        heads = (table.num_heads, table.head_dim) if table else (self.linear_num_heads, self.linear_head_dim)
        width = table.short_conv_kernel_size if table else self.linear_conv_kernel_dim
        return KimiDeltaAttention(self.hidden_size, *heads, width, self.rms_norm_eps)

    def dense(self, layer: int) -> bool:
        types = self.mlp_layer_types
        return super().dense(layer) if types is None else types[layer] == "dense"


class KimiLinearForCausalLM(DeepseekV2ForCausalLM):
    config_type = KimiLinearConfig
    other_names = MappingProxyType({".block_sparse_moe.": ".mlp."})
