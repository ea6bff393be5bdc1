"""Qwen3.5, dense and with experts, its text model: Qwen3-Next's layers, with projections that are not grouped by head.

Source: Qwen Team, the published code of *Qwen3.5*, 2026.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, Self

import attrs
from attrs.validators import ge

from hal.nn import GatedMLP, text_config

from .qwen3_next import HybridConfig, HybridLM, HybridMoeConfig, Rows

IMAGES = ("model.visual.", "visual.")
"""Prefixes of the tensors of the model that reads images."""


@attrs.frozen(kw_only=True)
class Qwen35MoeConfig(HybridMoeConfig):
    """The keys of the experts. The weights of a token's experts always add up to 1."""

    num_experts: int = attrs.field(default=256, validator=ge(1))
    num_experts_per_tok: int = 8
    norm_topk_prob: Literal[True] = True


def rows_of(config: HybridConfig) -> tuple[Rows, Rows]:
    """Return where the checkpoint has the rows of the projections of a recurrent layer."""
    sizes = config.sizes
    parts, heads = sizes.parts, sizes.value_heads
    keys, values = parts["key"], parts["value"]
    qkv = [("in_proj_qkv", start, size) for start, size in ((0, keys), (keys, keys), (2 * keys, values))]
    return [*qkv, ("in_proj_z", 0, values)], [("in_proj_b", 0, heads), ("in_proj_a", 0, heads)]


class Qwen35ForCausalLM(HybridLM):
    """The dense model, from its own checkpoint, or from that of a model that also reads images."""

    other_names = MappingProxyType({**HybridLM.other_names, "model.language_model.": "model."})
    ignored_prefixes = (*HybridLM.ignored_prefixes, *IMAGES)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        qwen = HybridConfig.from_config(text_config(config) if "text_config" in config else config)
        return cls(qwen, lambda layer: GatedMLP(qwen.hidden_size, qwen.intermediate_size), *rows_of(qwen))


class Qwen35MoeForCausalLM(Qwen35ForCausalLM):
    """The model with experts, from its own checkpoint, or from that of a model that also reads images."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        qwen = Qwen35MoeConfig.from_config(text_config(config) if "text_config" in config else config)
        return cls(qwen, qwen.mlp, *rows_of(qwen))
