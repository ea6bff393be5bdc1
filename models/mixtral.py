"""Mixtral: Mistral with a mixture of experts in each layer.

Source: Jiang et al., *Mixtral of Experts*, 2024.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Self

import attrs
from attrs.validators import ge, le

from hal.nn import (
    DecoderConfig,
    DecoderLayer,
    DecoderLM,
    RotaryEmbedding,
    Router,
    SelfAttention,
    SparseMLP,
    check_window,
)


@attrs.frozen(kw_only=True)
class MixtralConfig(DecoderConfig):
    """The decoder's keys, those of the experts, and the sliding window of all layers."""

    num_local_experts: int = attrs.field(default=8, validator=ge(1))
    num_experts_per_tok: int = 2
    rms_norm_eps: float = attrs.field(default=1e-5, validator=[ge(0.0), le(1.0)])
    sliding_window: int | None = attrs.field(default=None, validator=check_window)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], layer_type: str | None = None) -> Self:
        """Read a checkpoint's config.json. Without ``rope_theta``, it is 1,000,000."""
        return super().from_config(cls.with_defaults(config, rope_theta=1e6), layer_type)


class MixtralForCausalLM(DecoderLM):
    other_names = MappingProxyType({".block_sparse_moe.": ".mlp."})  # The name before version 5 of transformers.

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        mixtral = MixtralConfig.from_config(config)
        rotary = RotaryEmbedding(mixtral.head_dim, mixtral.rope)

        def layer() -> DecoderLayer:
            numbers = mixtral.num_local_experts, mixtral.num_experts_per_tok
            router = Router(mixtral.hidden_size, *numbers, renormalize=True)
            names = "w1", "w3", "w2"
            mlp = SparseMLP(router, mixtral.intermediate_size, names=names, activation=mixtral.hidden_act)
            return DecoderLayer(mixtral, SelfAttention(mixtral, rotary, window=mixtral.sliding_window), mlp)

        return cls(mixtral, (layer() for _ in range(mixtral.num_hidden_layers)))
