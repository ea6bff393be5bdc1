"""Phi-3, Phi-3.5 and Phi-4: Llama with merged projections, and positions scaled by a number for each pair.

Source: Abdin et al., *Phi-3 Technical Report*, 2024; *Phi-4 Technical Report*, 2024.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

import attrs
from attrs.validators import ge, le

from hal.nn import DecoderConfig, DecoderLayer, DecoderLM, GatedMLP, RotaryEmbedding, SelfAttention, check_window

OLDER = ("su", "yarn")
"""What older files call ``longrope``."""


@attrs.frozen(kw_only=True)
class Phi3Config(DecoderConfig):
    """The decoder's keys, the sliding window of all layers, and keys with the values of the published models."""

    partial_rotary = True
    mlp_bias: Literal[False] = False
    lm_head_bias: Literal[False] = False
    full_attn_mod: Literal[1] = 1
    interpolate_factor: Literal[1] = 1
    rms_norm_eps: float = attrs.field(default=1e-5, validator=[ge(0.0), le(1.0)])
    sliding_window: int | None = attrs.field(default=None, validator=check_window)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], layer_type: str | None = None) -> Self:
        """Read a checkpoint's config.json. Without ``original_max_position_embeddings``, it is 4,096."""
        given = cls.with_defaults(config, original_max_position_embeddings=4096)
        for key in ("rope_parameters", "rope_scaling"):
            if isinstance(table := config.get(key), Mapping):
                given[key] = {name: "longrope" if each in OLDER else each for name, each in table.items()}
        return super().from_config(given, layer_type)


class Phi3ForCausalLM(DecoderLM):
    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        phi = Phi3Config.from_config(config)
        rotary = RotaryEmbedding(phi.head_dim, phi.rope)

        def layer() -> DecoderLayer:
            attention = SelfAttention(phi, rotary, window=phi.sliding_window)
            mlp = GatedMLP(phi.hidden_size, phi.intermediate_size, activation=phi.hidden_act)
            return DecoderLayer(phi, attention, mlp)

        return cls(phi, (layer() for _ in range(phi.num_hidden_layers)))
