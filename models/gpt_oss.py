"""GPT-OSS: experts with biases and a clipped SwiGLU, attention sinks, and a window in every other layer.

Source: OpenAI, *gpt-oss-120b & gpt-oss-20b Model Card*, 2025, and its published code.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, Self

import attrs
from attrs.validators import ge, le

from hal import ops
from hal.nn import (
    AlternatingConfig,
    DecoderLayer,
    DecoderLM,
    LayerType,
    RotaryEmbedding,
    Router,
    SelfAttention,
    SparseMLP,
    check_window,
)

YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
"""The rope parameters of a config.json without any."""
_FACTOR = [ge(2.0**-16), le(2.0**16)]


@attrs.frozen(kw_only=True)
class GptOssConfig(AlternatingConfig):
    """The decoder's keys, and those of windows and experts, which have ``intermediate_size`` features each."""

    head_dim: int = 64
    rms_norm_eps: float = attrs.field(default=1e-5, validator=[ge(0.0), le(1.0)])
    hidden_act: Literal["silu"] = "silu"
    attention_bias: bool = True
    sliding_window: int | None = attrs.field(default=128, validator=check_window)
    num_local_experts: int = attrs.field(default=128, validator=ge(1))
    num_experts_per_tok: int = 4
    swiglu_alpha: float = attrs.field(default=1.702, validator=_FACTOR)
    swiglu_limit: float = attrs.field(default=7.0, validator=_FACTOR)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], layer_type: str | None = None) -> Self:
        """Read a checkpoint's config.json. Without ``rope_theta``, it is 150,000."""
        twice = ("experts_per_token", "initial_context_length")  # other names of what a published file also has
        given = {key: value for key, value in config.items() if key not in twice}
        if all(given.get(key) in (None, {}) for key in ("rope_parameters", "rope_scaling")):
            given["rope_parameters"] = YARN
        return super().from_config(cls.with_defaults(given, rope_theta=1.5e5), layer_type)


class GptOssForCausalLM(DecoderLM):
    other_names = MappingProxyType({".router.": ".gate."})

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        oss = GptOssConfig.from_config(config)
        rotary, numbers = RotaryEmbedding(oss.head_dim, oss.rope), (oss.num_local_experts, oss.num_experts_per_tok)
        swiglu = partial(ops.clipped_silu_and_mul, alpha=oss.swiglu_alpha, limit=oss.swiglu_limit, interleaved=True)
        options: dict[str, Any] = {"activation": swiglu, "bias": True, "interleaved": True, "transposed": True}

        def layer(kind: LayerType) -> DecoderLayer:
            router = Router(oss.hidden_size, *numbers, renormalize=True, bias=True)
            attention = SelfAttention(oss, rotary, window=oss.windows[kind], sinks=True)
            return DecoderLayer(oss, attention, SparseMLP(router, oss.intermediate_size, **options))

        return cls(oss, map(layer, oss.types(full_every=2)))
