"""Granite 3, dense or with a mixture of experts in each layer: Llama with factors of embeddings, scores and residuals.

Source: IBM Granite Team, *Granite 3.0 Language Models*, 2024.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, Self

import attrs
from attrs.validators import ge, le
from torch import nn

from hal.nn import DecoderConfig, DecoderLayer, DecoderLM, GatedMLP, RotaryEmbedding, Router, SelfAttention, SparseMLP

_FACTOR = [ge(2.0**-16), le(2.0**16)]


@attrs.frozen(kw_only=True)
class GraniteConfig(DecoderConfig):
    """The decoder's keys, and the factors. ``logits_scaling`` divides the logits."""

    mlp_bias: bool = False
    embedding_multiplier: float = attrs.field(default=1.0, validator=_FACTOR)
    attention_multiplier: float = attrs.field(default=1.0, validator=_FACTOR)
    residual_multiplier: float = attrs.field(default=1.0, validator=_FACTOR)
    logits_scaling: float = attrs.field(default=1.0, validator=_FACTOR)


@attrs.frozen(kw_only=True)
class GraniteMoeConfig(GraniteConfig):
    """Granite's keys, and those of the experts, which have ``intermediate_size`` features each."""

    mlp_bias: Literal[False] = False
    num_local_experts: int = attrs.field(default=8, validator=ge(1))
    num_experts_per_tok: int = 2


class GraniteForCausalLM(DecoderLM):
    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        granite = GraniteConfig.from_config(config)
        sizes = granite.hidden_size, granite.intermediate_size
        mlps = [
            GatedMLP(*sizes, activation=granite.hidden_act, bias=granite.mlp_bias)
            for _ in range(granite.num_hidden_layers)
        ]
        return cls.assemble(granite, mlps)

    @classmethod
    def assemble(cls, granite: GraniteConfig, mlps: Sequence[nn.Module]) -> Self:
        """Return a model with these MLPs."""
        rotary = RotaryEmbedding(granite.head_dim, granite.rope)

        def layer(mlp: nn.Module) -> DecoderLayer:
            attention = SelfAttention(granite, rotary, scale=granite.attention_multiplier)
            return DecoderLayer(granite, attention, mlp, residual_multiplier=granite.residual_multiplier)

        embedding, logits = granite.embedding_multiplier, 1 / granite.logits_scaling
        return cls(granite, map(layer, mlps), embedding_multiplier=embedding, logits_multiplier=logits)


class GraniteMoeForCausalLM(GraniteForCausalLM):
    other_names = MappingProxyType(
        {
            ".block_sparse_moe.": ".mlp.",
            ".input_linear.weight": ".experts.gate_up_proj",
            ".output_linear.weight": ".experts.down_proj",
            ".router.layer.": ".gate.",
            ".router.": ".gate.",  # in version 5 of transformers
        }
    )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        granite = GraniteMoeConfig.from_config(config)
        numbers = granite.num_local_experts, granite.num_experts_per_tok

        def mlp() -> SparseMLP:
            router = Router(granite.hidden_size, *numbers, renormalize=True)
            return SparseMLP(router, granite.intermediate_size, activation=granite.hidden_act)

        return cls.assemble(granite, [mlp() for _ in range(granite.num_hidden_layers)])
