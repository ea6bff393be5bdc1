"""Gemma 4, its text model: layers that share keys and values, embeddings for each layer, and perhaps experts.

Full layers have wider heads than those with a window, and may take keys as values. The last layers read the keys and
values of an earlier layer of their type. A mixture of experts stands beside each dense MLP.

Source: Gemma Team, the model card and the published code of Gemma 4, 2026.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Self

from hal.nn import FULL, SLIDING, DecoderLM, LayerType, RMSNorm, RotaryEmbedding, SelfAttention, text_config

from .gemma4_config import Gemma4Config
from .gemma4_layers import Gemma4Decoder, Gemma4Layer


class Gemma4ForCausalLM(DecoderLM):
    decoder = Gemma4Decoder
    other_names = MappingProxyType({".router.proj.": ".router."})

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        gemma = Gemma4Config.from_config(config)
        kinds: tuple[LayerType, ...] = (FULL, SLIDING)
        ropes, sized = {FULL: gemma.rope, SLIDING: gemma.local_rope}, {kind: gemma.sized(kind) for kind in kinds}
        rotary = {kind: RotaryEmbedding(sized[kind].head_dim, ropes[kind]) for kind in kinds}
        norm = partial(RMSNorm, eps=gemma.rms_norm_eps)
        shared = [source != index for index, source in enumerate(gemma.sources)]

        def layer(kind: LayerType, shared: bool) -> Gemma4Layer:
            attention = SelfAttention(
                sized[kind],
                rotary[kind],
                window=gemma.windows[kind],
                scale=1.0,
                norm=norm,
                value_norm=partial(norm, learned=False),
                key_as_value=gemma.attention_k_eq_v and kind == FULL,
                shared=shared,
            )
            return Gemma4Layer(
                gemma, attention, gemma.intermediate_size * (2 if shared and gemma.use_double_wide_mlp else 1)
            )

        factor, softcap = gemma.hidden_size**0.5, gemma.final_logit_softcapping
        model = cls(gemma, map(layer, gemma.kinds, shared), embedding_multiplier=factor, softcap=softcap)
        unused = [f"{part}_{layer}." for part in "kv" for layer in ("proj", "norm")]
        layers = [f"model.layers.{index}.self_attn." for index, each in enumerate(shared) if each]
        model.ignored_prefixes += tuple(layer + name for layer in layers for name in unused)
        return model


class Gemma4ForConditionalGeneration(Gemma4ForCausalLM):
    """The text model of a checkpoint that can also read images, and perhaps sound."""

    other_names = MappingProxyType({**Gemma4ForCausalLM.other_names, "model.language_model.": "model."})
    ignored_prefixes = tuple(
        f"{prefix}{part}."
        for part in ("vision_tower", "embed_vision", "audio_tower", "embed_audio")
        for prefix in ("", "model.")
    )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return super().from_config(text_config(config))
