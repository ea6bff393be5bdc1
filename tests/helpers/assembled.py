"""Families that differ in norms, placement, positions, MLP and factors, assembled outside of hal from ``hal.nn``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, Self

import attrs

from hal.nn import (
    MLP,
    SHARED_NORM,
    ActivationName,
    DecoderConfig,
    DecoderLayer,
    DecoderLM,
    GatedMLP,
    LayerNorm,
    RotaryEmbedding,
    SelfAttention,
)


@attrs.frozen(kw_only=True)
class CohereConfig(DecoderConfig):
    layer_norm_eps: float = 1e-5
    logit_scale: float = 0.0625
    tie_word_embeddings: bool = True
    use_qk_norm: Literal[False] = False


class CohereForCausalLM(DecoderLM):
    """Parallel layers with one norm without bias, adjacent pairs of elements, scaled logits."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        cohere = CohereConfig.from_config(config)
        norm = partial(LayerNorm, eps=cohere.layer_norm_eps, bias=False)
        rotary = RotaryEmbedding(cohere.head_dim, cohere.rope, interleaved=True)

        def layer() -> DecoderLayer:
            mlp = GatedMLP(cohere.hidden_size, cohere.intermediate_size, activation=cohere.hidden_act)
            attention = SelfAttention(cohere, rotary)
            return DecoderLayer(cohere, attention, mlp, norm=norm, norms=SHARED_NORM, parallel=True)

        layers = (layer() for _ in range(cohere.num_hidden_layers))
        return cls(cohere, layers, norm=norm, logits_multiplier=cohere.logit_scale)


@attrs.frozen(kw_only=True)
class PhiConfig(DecoderConfig):
    partial_rotary = True
    hidden_act: ActivationName = "gelu_new"
    layer_norm_eps: float = 1e-5
    qk_layernorm: bool = False


class PhiForCausalLM(DecoderLM):
    """Parallel layers with one norm, a plain MLP, biases everywhere, and rotation of a part of each head."""

    other_names = MappingProxyType(
        {
            ".dense.": ".o_proj.",
            ".fc1.": ".up_proj.",
            ".fc2.": ".down_proj.",
            ".q_layernorm.": ".q_norm.",
            ".k_layernorm.": ".k_norm.",
            "model.final_layernorm.": "model.norm.",
        }
    )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        phi = PhiConfig.from_config({**config, "partial_rotary_factor": config.get("partial_rotary_factor") or 0.5})
        norm = partial(LayerNorm, eps=phi.layer_norm_eps)
        rotary = RotaryEmbedding(phi.head_dim, phi.rope)

        def layer() -> DecoderLayer:
            attention = SelfAttention(phi, rotary, bias=(True, True), norm=norm if phi.qk_layernorm else None)
            mlp = MLP(phi.hidden_size, phi.intermediate_size, activation=phi.hidden_act, bias=True)
            return DecoderLayer(phi, attention, mlp, norm=norm, norms=SHARED_NORM, parallel=True)

        return cls(phi, (layer() for _ in range(phi.num_hidden_layers)), norm=norm, head_bias=True)


@attrs.frozen(kw_only=True)
class SmolLM3Config(DecoderConfig):
    mlp_bias: bool = False
    no_rope_layers: tuple[int, ...]


class SmolLM3ForCausalLM(DecoderLM):
    """Layers with and without a rotary embedding."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        smol = SmolLM3Config.from_config(config)
        rotary = RotaryEmbedding(smol.head_dim, smol.rope)

        def layer(rotates: int) -> DecoderLayer:
            attention = SelfAttention(smol, rotary if rotates else None)
            mlp = GatedMLP(smol.hidden_size, smol.intermediate_size, activation=smol.hidden_act)
            return DecoderLayer(smol, attention, mlp)

        return cls(smol, map(layer, smol.no_rope_layers))


@attrs.frozen(kw_only=True)
class NemotronConfig(DecoderConfig):
    partial_rotary = True
    hidden_act: ActivationName = "relu2"
    mlp_bias: bool = False
    norm_eps: float = 1e-5


class NemotronForCausalLM(DecoderLM):
    """Layer norms with 1 + weight, and a plain MLP with a squared ReLU."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        given = {**config, "partial_rotary_factor": config.get("partial_rotary_factor") or 0.5}
        nemotron = NemotronConfig.from_config(given)
        norm, rotary = (
            partial(LayerNorm, eps=nemotron.norm_eps, offset=1.0),
            RotaryEmbedding(nemotron.head_dim, nemotron.rope),
        )

        def layer() -> DecoderLayer:
            sizes = nemotron.hidden_size, nemotron.intermediate_size
            mlp = MLP(*sizes, activation=nemotron.hidden_act, bias=nemotron.mlp_bias)
            return DecoderLayer(nemotron, SelfAttention(nemotron, rotary), mlp, norm=norm)

        return cls(nemotron, (layer() for _ in range(nemotron.num_hidden_layers)), norm=norm)
