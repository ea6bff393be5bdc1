"""OLMo 2, and OLMo 3, in which three layers of four have a sliding window.

Norms follow attention and MLP, and the query's and the key's are over all heads.

Source: OLMo Team, *2 OLMo 2 Furious*, 2025; *Olmo 3*, 2025.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Self

import attrs
import torch
from attrs.validators import ge, le

from hal.nn import (
    FULL,
    POST_NORMS,
    SLIDING,
    AlternatingConfig,
    DecoderConfig,
    DecoderLayer,
    DecoderLM,
    GatedMLP,
    RMSNorm,
    RopeParameters,
    RotaryEmbedding,
    SelfAttention,
)


@attrs.frozen(kw_only=True)
class Olmo2Config(DecoderConfig):
    """The decoder's keys."""

    rms_norm_eps: float = attrs.field(default=1e-5, validator=[ge(0.0), le(1.0)])


@attrs.frozen(kw_only=True)
class Olmo3Config(AlternatingConfig, Olmo2Config):
    """The decoder's keys, and those that select layers with a window, whose rope parameters are not scaled."""

    local_rope: RopeParameters = attrs.field(factory=RopeParameters)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], layer_type: str | None = FULL) -> Self:
        """Read a checkpoint's config.json. Without ``rope_theta``, it is 500,000."""
        given = cls.with_defaults(config, rope_theta=5e5)
        local = RopeParameters.from_config({**given, "rope_scaling": None}, SLIDING)
        return attrs.evolve(super().from_config(given, layer_type), local_rope=local)


def layer(config: DecoderConfig, rotary: RotaryEmbedding, window: int | None = None) -> DecoderLayer:
    """Return a layer."""
    norm = partial(RMSNorm, eps=config.rms_norm_eps)
    attention = SelfAttention(config, rotary, window=window, norm=norm, norm_over="width")
    mlp = GatedMLP(config.hidden_size, config.intermediate_size, activation=config.hidden_act)
    return DecoderLayer(config, attention, mlp, norms=POST_NORMS)


class Olmo2ForCausalLM(DecoderLM):
    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        olmo = Olmo2Config.from_config(config)
        rotary = RotaryEmbedding(olmo.head_dim, olmo.rope, dtype=torch.float32)
        return cls(olmo, (layer(olmo, rotary) for _ in range(olmo.num_hidden_layers)))


class Olmo3ForCausalLM(DecoderLM):
    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        olmo = Olmo3Config.from_config(config)
        ropes = {FULL: olmo.rope, SLIDING: olmo.local_rope}
        rotary = {kind: RotaryEmbedding(olmo.head_dim, rope, dtype=torch.float32) for kind, rope in ropes.items()}
        return cls(olmo, (layer(olmo, rotary[kind], olmo.windows[kind]) for kind in olmo.types(full_every=4)))
