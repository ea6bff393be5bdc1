"""Gemma 2: norms before and after attention and MLP, bounded scores and logits, and a window in every other layer.

Source: Gemma Team, *Gemma 2: Improving Open Language Models at a Practical Size*, 2024.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Literal, Self

import attrs
from attrs.validators import ge, le, optional

from hal.nn import (
    FULL,
    SANDWICH_NORMS,
    SLIDING,
    ActivationName,
    AlternatingConfig,
    DecoderLayer,
    DecoderLM,
    GatedMLP,
    LayerType,
    RMSNorm,
    RotaryEmbedding,
    SelfAttention,
)

FACTOR = [ge(1.0), le(2.0**16)]
BOUND: Any = optional(FACTOR)


@attrs.frozen(kw_only=True)
class GemmaConfig(AlternatingConfig):
    """The keys that Gemma 2 and its successors share."""

    head_dim: int = 256
    hidden_act: ActivationName = "gelu_pytorch_tanh"
    tie_word_embeddings: bool = True
    final_logit_softcapping: float | None = attrs.field(default=None, validator=BOUND)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], layer_type: str | None = None) -> Self:
        """Read a checkpoint's config.json. ``hidden_activation`` has precedence over ``hidden_act``."""
        given = dict(config)
        if "hidden_activation" in given:
            given["hidden_act"] = given.pop("hidden_activation")
        return super().from_config(given, layer_type)


@attrs.frozen(kw_only=True)
class Gemma2Config(GemmaConfig):
    """Gemma's keys, and the scale and the bounds of scores and logits."""

    query_pre_attn_scalar: float = attrs.field(default=256.0, validator=FACTOR)
    final_logit_softcapping: float | None = attrs.field(default=30.0, validator=BOUND)
    attn_logit_softcapping: float | None = attrs.field(default=50.0, validator=BOUND)
    use_bidirectional_attention: Literal[False] = False


class Gemma2ForCausalLM(DecoderLM):
    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        gemma = Gemma2Config.from_config(config)
        rotary = RotaryEmbedding(gemma.head_dim, gemma.rope)
        scale = gemma.query_pre_attn_scalar**-0.5
        attention = partial(SelfAttention, scale=scale, softcap=gemma.attn_logit_softcapping)
        return cls.assemble(gemma, gemma.types(full_every=2), {FULL: rotary, SLIDING: rotary}, attention)

    @classmethod
    def assemble(
        cls,
        gemma: GemmaConfig,
        types: Iterable[LayerType],
        rotary: Mapping[LayerType, RotaryEmbedding],
        attention: Callable[..., SelfAttention],
    ) -> Self:
        """Return a model whose layers have these types, and the attention that ``attention`` makes."""
        norm = partial(RMSNorm, eps=gemma.rms_norm_eps, offset=1.0)

        def layer(kind: LayerType) -> DecoderLayer:
            attending = attention(gemma, rotary[kind], window=gemma.windows[kind])
            mlp = GatedMLP(gemma.hidden_size, gemma.intermediate_size, activation=gemma.hidden_act)
            return DecoderLayer(gemma, attending, mlp, norm=norm, norms=SANDWICH_NORMS)

        factor, softcap = gemma.hidden_size**0.5, gemma.final_logit_softcapping
        return cls(gemma, map(layer, types), norm=norm, embedding_multiplier=factor, softcap=softcap)
