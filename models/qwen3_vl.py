"""Qwen3-VL, dense and sparse: Qwen3's decoder, with the embeddings of images and videos among its tokens.

Source: Qwen Team, *Qwen3-VL Technical Report*, 2025.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Self

import attrs
from torch import nn

from hal.nn import (
    AxisRotaryEmbedding,
    AxisSections,
    DecoderConfig,
    GatedMLP,
    RMSNorm,
    SelfAttention,
    WindowConfig,
    text_config,
    vision_config,
)

from .qwen2_moe import ExpertConfig
from .qwen3_vl_tower import Qwen3VLTower, Qwen3VLTowerConfig
from .visual import DeepLayer, VisualLM

SECTIONS = (24, 20, 20)


@attrs.frozen(kw_only=True)
class Qwen3VLTextConfig(DecoderConfig):
    """The keys of ``text_config``."""

    head_dim: int = 128


@attrs.frozen(kw_only=True)
class Qwen3VLMoeTextConfig(ExpertConfig, WindowConfig):
    """The keys of ``text_config``, and those of the experts. The router always renormalizes its weights."""

    num_experts: int = 60
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 1408
    norm_topk_prob: bool = True


def with_theta(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of the text model, with the family's base of frequencies where they have none."""
    text = text_config(config)
    tables = [each for key in ("rope_parameters", "rope_scaling") if isinstance(each := text.get(key), Mapping)]
    known = text.get("rope_theta") is not None or any(each.get("rope_theta") is not None for each in tables)
    return text if known else {**text, "rope_theta": 5e5}


class Qwen3VLForConditionalGeneration(VisualLM):
    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        text = Qwen3VLTextConfig.from_config(with_theta(config))
        return cls.assembled(
            config,
            text,
            lambda layer: GatedMLP(text.hidden_size, text.intermediate_size, activation=text.hidden_act),
        )

    @classmethod
    def assembled(cls, config: Mapping[str, Any], text: DecoderConfig, mlp: Callable[[int], nn.Module]) -> Self:
        """Return the model.

        Args:
            config: the content of config.json.
            text: the text model's keys.
            mlp: makes the MLP of a layer.

        Raises:
            ConfigError: the model does not support the config.
            ValueError: the tower does not fit the text model.
        """
        tower = Qwen3VLTowerConfig.from_config(vision_config(config))
        sections = AxisSections.from_config(text_config(config), SECTIONS, interleaved=True)
        rotary = AxisRotaryEmbedding(text.head_dim, text.rope, sections)
        norm = partial(RMSNorm, eps=text.rms_norm_eps)

        def layer(index: int) -> DeepLayer:
            return DeepLayer(text, SelfAttention(text, rotary, norm=norm), mlp(index))

        model = cls(text, map(layer, range(text.num_hidden_layers)))
        return model.attach(Qwen3VLTower(tower), tower.out_hidden_size, config)


class Qwen3VLMoeForConditionalGeneration(Qwen3VLForConditionalGeneration):
    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        text = Qwen3VLMoeTextConfig.from_config(with_theta(config))

        def mlp(layer: int) -> nn.Module:
            return text.mlp(layer, transposed=True, by_shape=True)

        return cls.assembled(config, text, mlp)
