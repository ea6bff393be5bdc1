"""Qwen3: a decoder with grouped-query attention and a norm on every query and key head.

Source: Qwen Team, *Qwen3 Technical Report*, 2025.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs
from torch import Tensor

from hal.nn import DecoderConfig, DecoderLayer, DecoderLM, GatedMLP, RMSNorm, SelfAttention, check_window

LayerType = Literal["full_attention", "sliding_attention"]


def check_layer_types(config: Any, attribute: Any, value: tuple[LayerType, ...] | None) -> None:
    """Validate ``layer_types``, as an attrs validator: one type per layer."""
    if value is not None and len(value) != config.num_hidden_layers:
        raise ValueError(f"layer_types has {len(value)} entries for {config.num_hidden_layers} layers")


@attrs.frozen(kw_only=True)
class Qwen3Config(DecoderConfig):
    """The decoder's keys, and those that select layers with a sliding window.

    ``layer_types`` selects them explicitly. Without it, the layers from ``max_window_layers`` on have a window.
    """

    head_dim: int = 128
    use_sliding_window: bool = False
    sliding_window: int | None = attrs.field(default=4096, validator=check_window)
    max_window_layers: int = 28
    layer_types: tuple[LayerType, ...] | None = attrs.field(default=None, validator=check_layer_types)

    def window(self, layer: int) -> int | None:
        """Return the sliding window of a layer, or None."""
        if not self.use_sliding_window:
            return None
        slides = layer >= self.max_window_layers
        if self.layer_types is not None:
            slides = self.layer_types[layer] == "sliding_attention"
        return self.sliding_window if slides else None


class Qwen3Attention(SelfAttention):
    def __init__(self, config: DecoderConfig, sliding_window: int | None) -> None:
        super().__init__(config, sliding_window=sliding_window)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return super().rotate(self.q_norm(query), self.k_norm(key), cos, sin)


class Qwen3Layer(DecoderLayer):
    def __init__(self, config: Qwen3Config, layer: int) -> None:
        mlp = GatedMLP(config.hidden_size, config.intermediate_size)
        super().__init__(config, Qwen3Attention(config, config.window(layer)), mlp)


class Qwen3ForCausalLM(DecoderLM):
    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config, [Qwen3Layer(config, layer) for layer in range(config.num_hidden_layers)])

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Qwen3ForCausalLM:
        return cls(Qwen3Config.from_config(config))
