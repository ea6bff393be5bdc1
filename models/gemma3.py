"""Gemma 3, its text model: norms before and after attention and MLP, and windows in most layers.

Source: Gemma Team, *Gemma 3 Technical Report*, 2025.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, Self

import attrs
from attrs.validators import ge, le, optional

from hal.nn import (
    FULL,
    SANDWICH_NORMS,
    SLIDING,
    ActivationName,
    DecoderConfig,
    DecoderLayer,
    DecoderLM,
    GatedMLP,
    LayerType,
    RMSNorm,
    RopeParameters,
    RotaryEmbedding,
    SelfAttention,
    check_layer_types,
    check_window,
)

_FACTOR = [ge(1.0), le(2.0**16)]


@attrs.frozen(kw_only=True)
class Gemma3Config(DecoderConfig):
    """The decoder's keys, and those of windows, scores and logits. Layers with a window have other rope parameters.

    Without ``layer_types``, every layer has a window except each ``sliding_window_pattern``-th.
    """

    head_dim: int = 256
    hidden_act: ActivationName = "gelu_pytorch_tanh"
    tie_word_embeddings: bool = True
    query_pre_attn_scalar: float = attrs.field(default=256.0, validator=_FACTOR)
    sliding_window: int | None = attrs.field(default=4096, validator=check_window)
    sliding_window_pattern: int = attrs.field(default=6, validator=ge(1))
    layer_types: tuple[LayerType, ...] | None = attrs.field(default=None, validator=check_layer_types)
    final_logit_softcapping: float | None = attrs.field(default=None, validator=optional(_FACTOR))
    use_bidirectional_attention: Literal[False] = False
    local_rope: RopeParameters = attrs.field(factory=RopeParameters)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], layer_type: str | None = FULL) -> Self:
        """Read a checkpoint's config.json. Older ones have the rope parameters of full layers beside a local base."""
        given = {key: value for key, value in config.items() if key != "_sliding_window_pattern"}  # as layer_types
        if "hidden_activation" in given:
            given["hidden_act"] = given.pop("hidden_activation")
        base, scaling = given.pop("rope_local_base_freq", None), given.pop("rope_scaling", None)
        local = RopeParameters.from_config({**given, "rope_theta": base or 1e4}, SLIDING)
        given |= {"rope_theta": given.get("rope_theta") or 1e6, "rope_scaling": scaling}
        return attrs.evolve(super().from_config(given, layer_type), local_rope=local)

    def types(self) -> tuple[LayerType, ...]:
        """Return the type of each layer."""
        if self.layer_types is not None:
            return self.layer_types
        return tuple(SLIDING if (i + 1) % self.sliding_window_pattern else FULL for i in range(self.num_hidden_layers))


class Gemma3ForCausalLM(DecoderLM):
    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        gemma = Gemma3Config.from_config(config)
        norm = partial(RMSNorm, eps=gemma.rms_norm_eps, offset=1.0)
        ropes, windows = {FULL: gemma.rope, SLIDING: gemma.local_rope}, {FULL: None, SLIDING: gemma.sliding_window}
        rotary = {kind: RotaryEmbedding(gemma.head_dim, rope) for kind, rope in ropes.items()}
        scale = gemma.query_pre_attn_scalar**-0.5

        def layer(kind: LayerType) -> DecoderLayer:
            attention = SelfAttention(gemma, rotary[kind], window=windows[kind], scale=scale, norm=norm)
            mlp = GatedMLP(gemma.hidden_size, gemma.intermediate_size, activation=gemma.hidden_act)
            return DecoderLayer(gemma, attention, mlp, norm=norm, norms=SANDWICH_NORMS)

        factor, softcap = gemma.hidden_size**0.5, gemma.final_logit_softcapping
        return cls(gemma, map(layer, gemma.types()), norm=norm, embedding_multiplier=factor, softcap=softcap)
