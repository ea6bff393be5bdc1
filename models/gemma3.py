"""Gemma 3, its text model: Gemma 2 with norms of query and key, and a window in most layers.

Source: Gemma Team, *Gemma 3 Technical Report*, 2025.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Self

import attrs
from attrs.validators import ge

from hal.nn import FULL, SLIDING, LayerType, RMSNorm, RopeParameters, RotaryEmbedding, SelfAttention, text_config

from .gemma2 import FACTOR, Gemma2ForCausalLM, GemmaConfig


@attrs.frozen(kw_only=True)
class Gemma3Config(GemmaConfig):
    """Gemma's keys. Layers with a window have other rope parameters.

    Without ``layer_types``, every layer has a window except each ``sliding_window_pattern``-th.
    """

    query_pre_attn_scalar: float = attrs.field(default=256.0, validator=FACTOR)
    sliding_window_pattern: int = attrs.field(default=6, validator=ge(1))
    local_rope: RopeParameters = attrs.field(factory=RopeParameters)
    use_bidirectional_attention: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any], layer_type: str | None = FULL) -> Self:
        """Read a checkpoint's config.json. Older ones have the rope parameters of full layers beside a local base."""
        given = {key: value for key, value in config.items() if key != "_sliding_window_pattern"}  # as layer_types
        base, scaling = given.pop("rope_local_base_freq", None), given.pop("rope_scaling", None)
        local = RopeParameters.from_config({**given, "rope_theta": 1e4 if base is None else base}, SLIDING)
        given = cls.with_defaults({**given, "rope_scaling": scaling}, rope_theta=1e6)
        read = attrs.evolve(super().from_config(given, layer_type), local_rope=local)
        if read.use_bidirectional_attention and read.sliding_window:  # It counts the tokens on both sides together.
            return attrs.evolve(read, sliding_window=read.sliding_window // 2 + 1)
        return read


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        gemma = Gemma3Config.from_config(config)
        ropes: dict[LayerType, RopeParameters] = {FULL: gemma.rope, SLIDING: gemma.local_rope}
        rotary = {kind: RotaryEmbedding(gemma.head_dim, rope) for kind, rope in ropes.items()}
        norm = partial(RMSNorm, eps=gemma.rms_norm_eps, offset=1.0)
        types = gemma.types(gemma.sliding_window_pattern)
        scale, causal = gemma.query_pre_attn_scalar**-0.5, not gemma.use_bidirectional_attention
        attention = partial(SelfAttention, norm=norm, scale=scale, causal=causal)
        return cls.assemble(gemma, types, rotary, attention)


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """The text model of a checkpoint that can also read images."""

    other_names = MappingProxyType(
        {
            "language_model.model.": "model.",
            "language_model.lm_head.": "lm_head.",
            "model.language_model.": "model.",  # in version 5 of transformers
        }
    )
    ignored_prefixes = (
        "vision_tower.",
        "multi_modal_projector.",
        "model.vision_tower.",
        "model.multi_modal_projector.",
    )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return super().from_config(text_config(config))
