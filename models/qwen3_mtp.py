"""The layer of Qwen3-Next and Qwen3.5 that predicts the token after the next one (MTP), as a separate model.

It reads the hidden states of the target model, which is loaded from the same checkpoint, and the tokens that follow.

Source: Gloeckle et al., *Better & Faster Large Language Models via Multi-token Prediction*, 2024; Qwen Team,
*Qwen3-Next*, 2025.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from hal.nn import (
    Decoder,
    DecoderConfig,
    DecoderLayer,
    DraftLM,
    Linear,
    Norm,
    RMSNorm,
    RotaryEmbedding,
    SelfAttention,
    text_config,
)
from hal.step import draft_batch

from .qwen3_5 import IMAGES, Qwen35MoeConfig
from .qwen3_next import HybridConfig, HybridLM, HybridMoeConfig


class Predictor(Decoder):
    """A decoder that reads the embeddings of the next tokens beside the target's hidden states."""

    def __init__(self, config: DecoderConfig, layers: Iterable[DecoderLayer], *, norm: Norm, **options: Any) -> None:
        super().__init__(config, layers, norm=norm, **options)
        width = config.hidden_size
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = norm(width), norm(width)
        self.fc = Linear(2 * width, width)

    def embed(self, batch: Any) -> Tensor:
        embedding, hidden = super().embed(batch), batch.hidden_states
        return self.fc(torch.cat([self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)], dim=-1))


class HybridMTP(DraftLM):
    """A predictor with one layer of gated attention, and the target's embedding and output projection.

    The hidden states that a step returns are the input of the step for the token after.

    Args:
        config: the sizes.
    """

    decoder = Predictor
    base_name = "mtp"
    mtp: Predictor
    keys: ClassVar[type[HybridConfig]]
    other_names = MappingProxyType(
        {
            "model.embed_tokens.": "mtp.embed_tokens.",
            "model.language_model.embed_tokens.": "mtp.embed_tokens.",
            ".shared_expert.": HybridLM.other_names[".shared_expert."],
        }
    )
    ignored_prefixes = (*(f"model.{part}" for part in ("layers.", "norm.", "language_model.")), *IMAGES)

    def __init__(self, config: HybridConfig) -> None:
        if config.mtp_use_dedicated_embeddings:
            raise ValueError("mtp_use_dedicated_embeddings is true, and only the target's embedding is supported")
        norm = partial(RMSNorm, eps=config.rms_norm_eps, offset=1.0)
        attention = SelfAttention(config, RotaryEmbedding(config.head_dim, config.rope), norm=norm, gate=True)
        super().__init__(config, [DecoderLayer(config, attention, config.mlp(0), norm=norm)], norm=norm)
        self.batch_type = draft_batch(config.hidden_size, torch.float32)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(cls.keys.from_config(text_config(config) if "text_config" in config else config))


class Qwen3NextMTP(HybridMTP):
    keys = HybridMoeConfig


class Qwen35MTP(HybridMTP):
    """The dense model's, from its own checkpoint, or from that of a model that also reads images."""

    keys = HybridConfig


class Qwen35MoeMTP(HybridMTP):
    """That of the model with experts, from its own checkpoint, or from that of a model that also reads images."""

    keys = Qwen35MoeConfig
