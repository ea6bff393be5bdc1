"""Qwen3.5, dense and with experts: Qwen3-Next's layers, with projections that are not grouped by head, and a tower.

The tower is that of Qwen3-VL without DeepStack.

Source: Qwen Team, the published code of *Qwen3.5*, 2026.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self

import attrs
from attrs.validators import ge, max_len

from hal.nn import AxisRotaryEmbedding, AxisSections, text_config, vision_config

from .qwen3_next import HybridConfig, HybridLM, HybridMoeConfig
from .qwen3_vl_tower import Qwen3VLTower, Qwen3VLTowerConfig
from .visual import VisualLM

SECTIONS = (11, 11, 10)

IMAGES = ("model.visual.", "visual.")
"""Prefixes of the tensors of the model that reads images."""


@attrs.frozen(kw_only=True)
class Qwen35MoeConfig(HybridMoeConfig):
    """The keys of the experts. The weights of a token's experts always add up to 1."""

    num_experts: int = attrs.field(default=256, validator=ge(1))
    num_experts_per_tok: int = 8
    norm_topk_prob: Literal[True] = True


@attrs.frozen(kw_only=True)
class Qwen35TowerConfig(Qwen3VLTowerConfig):
    """The keys of the tower, which has no DeepStack."""

    deepstack_visual_indexes: tuple[int, ...] = attrs.field(default=(), validator=max_len(0))


class Qwen35LM(HybridLM):
    """Qwen3.5's layers: each part of a recurrent layer's projections has its own rows."""

    keys: ClassVar[type[HybridConfig]] = HybridConfig
    projections = MappingProxyType(
        {
            "in_proj_qkv": ("query", "key", "value"),
            "in_proj_z": ("gate",),
            "in_proj_b": ("b",),
            "in_proj_a": ("a",),
        }
    )
    grouped = False


class Qwen35ForCausalLM(Qwen35LM):
    """The dense text model, from its own checkpoint, or from that of a model that also reads images."""

    other_names = MappingProxyType({**HybridLM.other_names, "model.language_model.": "model."})
    ignored_prefixes = (*HybridLM.ignored_prefixes, *IMAGES)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(cls.keys.from_config(text_config(config) if "text_config" in config else config))


class Qwen35MoeForCausalLM(Qwen35ForCausalLM):
    """The text model with experts, from its own checkpoint, or from that of a model that also reads images."""

    keys = Qwen35MoeConfig


class Qwen35ForConditionalGeneration(VisualLM, Qwen35LM):
    """The dense model that reads images and videos."""

    other_names = MappingProxyType({**HybridLM.other_names, **VisualLM.other_names})

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        text, tower = cls.keys.from_config(text_config(config)), Qwen35TowerConfig.from_config(vision_config(config))
        sections = AxisSections.from_config(text_config(config), SECTIONS, interleaved=True)
        model = cls(text, AxisRotaryEmbedding(text.head_dim, text.rope, sections))
        return model.attach(Qwen3VLTower(tower), tower.out_hidden_size, config)


class Qwen35MoeForConditionalGeneration(Qwen35ForConditionalGeneration):
    """The model with experts that reads images and videos."""

    keys = Qwen35MoeConfig
