"""Qwen3.5, dense and with experts: Qwen3-Next's layers, with projections that are not grouped by head, and a tower.

The tower is that of Qwen3-VL without DeepStack.

Source: Qwen Team, the published code of *Qwen3.5*, 2026.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, Self

import attrs
from attrs.validators import ge, max_len
from torch import nn

from hal.nn import AxisRotaryEmbedding, AxisSections, GatedMLP, text_config, vision_config

from .qwen3_next import HybridConfig, HybridLM, HybridMoeConfig, Rows
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


def rows_of(config: HybridConfig) -> tuple[Rows, Rows]:
    """Return where the checkpoint has the rows of the projections of a recurrent layer."""
    sizes = config.sizes
    parts, heads = sizes.parts, sizes.value_heads
    keys, values = parts["key"], parts["value"]
    qkv = [("in_proj_qkv", start, size) for start, size in ((0, keys), (keys, keys), (2 * keys, values))]
    return [*qkv, ("in_proj_z", 0, values)], [("in_proj_b", 0, heads), ("in_proj_a", 0, heads)]


@attrs.frozen(kw_only=True)
class Qwen35TowerConfig(Qwen3VLTowerConfig):
    """The keys of the tower, which has no DeepStack."""

    deepstack_visual_indexes: tuple[int, ...] = attrs.field(default=(), validator=max_len(0))


def dense_mlp(config: HybridConfig) -> Callable[[int], nn.Module]:
    """Return what makes the MLP of a layer."""
    return lambda layer: GatedMLP(config.hidden_size, config.intermediate_size)


class Qwen35ForCausalLM(HybridLM):
    """The dense text model, from its own checkpoint, or from that of a model that also reads images."""

    other_names = MappingProxyType({**HybridLM.other_names, "model.language_model.": "model."})
    ignored_prefixes = (*HybridLM.ignored_prefixes, *IMAGES)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        qwen = HybridConfig.from_config(text_config(config) if "text_config" in config else config)
        return cls(qwen, dense_mlp(qwen), *rows_of(qwen))


class Qwen35MoeForCausalLM(Qwen35ForCausalLM):
    """The text model with experts, from its own checkpoint, or from that of a model that also reads images."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        qwen = Qwen35MoeConfig.from_config(text_config(config) if "text_config" in config else config)
        return cls(qwen, qwen.mlp, *rows_of(qwen))


class Qwen35ForConditionalGeneration(VisualLM, HybridLM):
    """The dense model that reads images and videos."""

    other_names = MappingProxyType({**HybridLM.other_names, **VisualLM.other_names})

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        text = HybridConfig.from_config(text_config(config))
        return cls.assembled(config, text, dense_mlp(text))

    @classmethod
    def assembled(cls, config: Mapping[str, Any], text: HybridConfig, mlp: Callable[[int], nn.Module]) -> Self:
        """Return the model.

        Args:
            config: the content of config.json.
            text: the text model's keys.
            mlp: makes the MLP of a layer.

        Raises:
            ConfigError: the model does not support the config.
            ValueError: the tower does not fit the text model.
        """
        tower = Qwen35TowerConfig.from_config(vision_config(config))
        sections = AxisSections.from_config(text_config(config), SECTIONS, interleaved=True)
        rotary = AxisRotaryEmbedding(text.head_dim, text.rope, sections)
        model = cls(text, mlp, *rows_of(text), rotary)
        return model.attach(Qwen3VLTower(tower), tower.out_hidden_size, config)


class Qwen35MoeForConditionalGeneration(Qwen35ForConditionalGeneration):
    """The model with experts that reads images and videos."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        text = Qwen35MoeConfig.from_config(text_config(config))
        return cls.assembled(config, text, text.mlp)
