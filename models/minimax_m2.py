"""MiniMax-M2: norms over all heads of query and key, and in each layer experts that a sigmoid router chooses.

Source: MiniMax, the model card of MiniMax-M2, 2025, and its published code.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, Self

import attrs
from attrs.validators import deep_iterable, ge, in_, le

from hal.nn import DecoderConfig, DecoderLayer, DecoderLM, RMSNorm, RotaryEmbedding, Router, SelfAttention, SparseMLP

FULL_ATTENTION = 1
"""The number of full attention in ``attn_type_list``."""


@attrs.frozen(kw_only=True)
class RotaryDimConfig(DecoderConfig):
    """The decoder's keys, and ``rotary_dim``, the number of elements of each head that are rotated."""

    partial_rotary = True
    head_dim: int = 128
    rotary_dim: int | None = attrs.field(default=None)

    @rotary_dim.validator
    def _within_a_head(self, attribute: Any, value: int | None) -> None:
        if value is not None and not 2 <= value <= self.head_dim:
            raise ValueError(f"rotary_dim is {value}; it must be from 2 to head_dim, {self.head_dim}")

    @classmethod
    def from_config(cls, config: Mapping[str, Any], layer_type: str | None = None) -> Self:
        """Read a checkpoint's config.json. Without ``rope_theta``, it is 5,000,000."""
        given = cls.with_defaults(config, rope_theta=5e6, head_dim=128)
        rotated, width = given.get("rotary_dim"), given["head_dim"]
        if type(rotated) is type(width) is int and 0 < rotated <= width:
            given = cls.with_defaults(given, partial_rotary_factor=rotated / width)
        return super().from_config(given, layer_type)


@attrs.frozen(kw_only=True)
class MiniMaxM2Config(RotaryDimConfig):
    """The keys of attention, those of the experts, and those with the values of the published models."""

    num_local_experts: int = attrs.field(default=256, validator=ge(1))
    num_experts_per_tok: int = 8
    num_mtp_modules: int = attrs.field(default=0, validator=[ge(0), le(64)])
    attn_type_list: tuple[int, ...] = attrs.field(default=(), validator=deep_iterable(in_([FULL_ATTENTION])))
    scoring_func: Literal["sigmoid"] = "sigmoid"
    use_routing_bias: Literal[True] = True
    use_qk_norm: Literal[True] = True
    qk_norm_type: Literal["per_layer"] = "per_layer"
    shared_intermediate_size: Literal[0] = 0


class MiniMaxM2ForCausalLM(DecoderLM):
    other_names = MappingProxyType(
        {
            ".block_sparse_moe.e_score": ".mlp.gate.e_score",
            ".block_sparse_moe.": ".mlp.",
            ".mlp.e_score": ".mlp.gate.e_score",
        }
    )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        minimax = MiniMaxM2Config.from_config(config)
        rotary = RotaryEmbedding(minimax.head_dim, minimax.rope)
        norm, numbers = (
            partial(RMSNorm, eps=minimax.rms_norm_eps),
            (minimax.num_local_experts, minimax.num_experts_per_tok),
        )

        def layer(index: int) -> DecoderLayer:
            attention = SelfAttention(minimax, rotary, norm=norm, norm_over="width")
            router = Router(
                minimax.hidden_size, *numbers, sigmoid=True, renormalize=True, correction=True, wide_weights=True
            )
            names = "w1", "w3", "w2"
            mlp = SparseMLP(router, minimax.intermediate_size, names=names, activation=minimax.hidden_act)
            return DecoderLayer(minimax, attention, mlp)

        layers = map(layer, range(minimax.num_hidden_layers))
        return cls(minimax, layers, ignored_layers=minimax.num_mtp_modules)
