"""The layer of DeepSeek and GLM that predicts the token after the next one (MTP), as a separate model.

A checkpoint has it behind the model's last layer, under the next number. Of several such layers, this is the first.

Where the model selects positions, this layer has its own index, even if the model's layers share theirs.

Source: DeepSeek-AI, *DeepSeek-V3 Technical Report*, 2024; GLM-4.5 Team, *GLM-4.5*, 2025.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Self

import torch

from hal.nn import DecoderConfig, DecoderLayer, DraftLM, RMSNorm
from hal.step import draft_batch

from .deepseek import DeepseekV3Config
from .deepseek_v32 import DeepseekV32Config, SelectiveDecoder
from .glm4_moe import Glm4MoeConfig
from .glm_moe_dsa import GlmMoeDsaConfig
from .qwen3_mtp import Predictor


class NumberedMTP(DraftLM):
    """A predictor with one of the model's layers, and the target's embedding and output projection.

    Args:
        config: the sizes.
        layer: the layer.
        layers: the number of such layers in the checkpoint.
    """

    decoder = Predictor
    base_name = "mtp"
    mtp: Predictor
    keys: ClassVar[type[DeepseekV3Config | Glm4MoeConfig]]

    def __init__(self, config: DecoderConfig, layer: DecoderLayer, layers: int) -> None:
        super().__init__(config, [layer], norm=partial(RMSNorm, eps=config.rms_norm_eps))
        first = config.num_hidden_layers
        own = f"model.layers.{first}."
        self.other_names = {
            "model.embed_tokens.": "mtp.embed_tokens.",
            f"{own}eh_proj.": "mtp.fc.",
            f"{own}enorm.": "mtp.pre_fc_norm_embedding.",
            f"{own}hnorm.": "mtp.pre_fc_norm_hidden.",
            f"{own}shared_head.norm.": "mtp.norm.",
            own: "mtp.layers.0.",
        }
        others = [f"model.layers.{each}." for each in range(first + layers) if each != first]
        # Its copies of what the target has are left out.
        self.ignored_prefixes = (*others, "model.norm.", f"{own}embed_tokens.", f"{own}shared_head.head.")
        self.batch_type = draft_batch(config.hidden_size, torch.float32)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        keys = cls.keys.from_config(config)
        return cls(keys, keys.layer(keys.num_hidden_layers, keys.rotary()), keys.num_nextn_predict_layers)


class DeepseekV3MTP(NumberedMTP):
    keys = DeepseekV3Config


class Glm4MoeMTP(NumberedMTP):
    keys = Glm4MoeConfig


class SelectivePredictor(SelectiveDecoder, Predictor):
    """A predictor whose layer attends to the positions that its own index selects."""


class DeepseekV32MTP(NumberedMTP):
    decoder = SelectivePredictor
    keys = DeepseekV32Config


class GlmMoeDsaMTP(DeepseekV32MTP):
    keys = GlmMoeDsaConfig
