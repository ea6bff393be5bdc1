"""EAGLE-3: one layer that drafts for a target model, from the inputs of some of the target's layers.

It uses the target's embedding. Its output projection covers a part of the vocabulary.

Source: Li et al., *EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test*, 2025.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, Self

import attrs
import torch
from attrs.validators import ge
from torch import Tensor, nn

from hal.nn import (
    LAYER_INPUTS,
    Angles,
    CausalLM,
    Decoder,
    DecoderConfig,
    DecoderLayer,
    DecoderLM,
    DraftLM,
    DraftVocabulary,
    GatedMLP,
    LayerState,
    Linear,
    RMSNorm,
    RotaryEmbedding,
    SelfAttention,
)
from hal.step import Batch, draft_batch


@attrs.frozen(kw_only=True)
class EagleConfig(DecoderConfig):
    """The decoder's keys, and those of the head.

    Attributes:
        draft_vocab_size: the tokens that it can draft; None for all.
        target_hidden_size: the width of the target's layers; None for its own.
        target_layers: the layers of the target whose inputs it reads, ``eagle_aux_hidden_state_layer_ids``; None for 2,
            half of their number, and three less than it.
        norm_before_residual: whether the residual is the normalized input.
    """

    partial_rotary = True
    draft_vocab_size: int | None = attrs.field(default=None, validator=attrs.validators.optional(ge(1)))
    target_hidden_size: int | None = None
    target_layers: tuple[int, ...] | None = None
    norm_before_residual: bool = False
    norm_before_fc: Literal[False] = False
    norm_output: Literal[False] = False
    fc_norm: Literal[False] = False

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.num_hidden_layers != 1 or self.tie_word_embeddings:
            raise ValueError(
                f"num_hidden_layers is {self.num_hidden_layers} and tie_word_embeddings {self.tie_word_embeddings}; "
                "a head of EAGLE-3 has one layer, and does not tie its output projection"
            )
        if (self.draft_vocab_size or 0) > self.vocab_size:
            raise ValueError(f"draft_vocab_size, {self.draft_vocab_size}, exceeds vocab_size, {self.vocab_size}")

    @classmethod
    def from_config(cls, config: Mapping[str, Any], layer_type: str | None = None) -> Self:
        """Read a checkpoint's config.json."""
        given = dict(config)
        eagle = dict(given.pop("eagle_config", None) or {})
        layers = eagle.pop("eagle_aux_hidden_state_layer_ids", given.pop("eagle_aux_hidden_state_layer_ids", None))
        if eagle.pop("use_aux_hidden_state", True) is not True or any(eagle.values()):
            raise ValueError(f"eagle_config has {eagle or 'use_aux_hidden_state: false'}, which is not supported")
        return super().from_config({**given, "target_layers": layers}, layer_type)


class EagleLayer(DecoderLayer):
    """A layer whose attention reads the embeddings of the next tokens beside the hidden states."""

    def __init__(self, config: EagleConfig) -> None:
        rotary, width = RotaryEmbedding(config.head_dim, config.rope), config.hidden_size
        mlp = GatedMLP(width, config.intermediate_size, activation=config.hidden_act)
        super().__init__(config, SelfAttention(config, rotary, inputs=2 * width), mlp)
        self.hidden_norm = RMSNorm(width, config.rms_norm_eps)
        self.norm_before_residual = config.norm_before_residual

    def forward(self, hidden: Tensor, angles: Angles, batch: Batch, state: LayerState, *further: Any) -> Tensor:
        (embeddings,), normed = further, self.hidden_norm(hidden)
        read = torch.cat([self._norm(self.norms.before_attention, embeddings), normed], dim=-1)
        hidden = (normed if self.norm_before_residual else hidden) + self.self_attn(read, angles, batch, state)
        return hidden + self.feed_forward(hidden, self._norm(self.norms.before_mlp, hidden), batch)


class EagleDecoder(Decoder):
    """The layer, whose output before the last norm is what the next step reads."""

    def embed(self, batch: Any) -> Tensor:
        hidden: Tensor = batch.hidden_states
        return hidden

    def further(self, batch: Batch, embeddings: Tensor) -> list[tuple[Any, ...]]:
        return [(self.embed_tokens(batch.token_ids),)]


class LlamaForCausalLMEagle3(DraftLM):
    """A head of EAGLE-3.

    Args:
        config: the sizes.
    """

    decoder = EagleDecoder
    other_names = MappingProxyType({"midlayer.": "layers.0."})
    ignored = ("d2t", "t2d", "embed_tokens.weight")  # of which the vocabulary reads the first; see share
    reads = LAYER_INPUTS

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config, [EagleLayer(config)], norm=lambda width: nn.Identity())
        del self.base.embed_tokens  # the target's, which most checkpoints leave out
        self.config, width = config, config.hidden_size
        self.target_width = config.target_hidden_size or width
        self.fc = Linear(len(config.target_layers or range(3)) * self.target_width, width)
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.lm_head = Linear(width, config.draft_vocab_size or config.vocab_size)
        self.vocabulary = DraftVocabulary(config.vocab_size, self.lm_head.out_features)
        self.batch_type = draft_batch(width, torch.float32)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(EagleConfig.from_config(config))

    def read(self, found: Tensor) -> Tensor:
        return self.fc(found)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the whole vocabulary; see :class:`hal.nn.DraftVocabulary`."""
        return self.vocabulary(self.lm_head(self.norm(hidden)))

    def share(self, target: CausalLM) -> None:
        """Use the target's embedding, and let the target return the inputs of its layers."""
        assert isinstance(target, DecoderLM)
        self.base.embed_tokens, count = target.base.embed_tokens, len(target.base.layers)
        target.keep_inputs(self.config.target_layers or (2, count // 2, count - 3), self.target_width)

    def finish_loading(self, backend: Any, checkpoint: Any) -> None:
        """Declare the hidden states in the dtype of the weights, and read which tokens it drafts."""
        self.batch_type = draft_batch(self.config.hidden_size, self.norm.weight.dtype)
        self.vocabulary.load(backend, checkpoint)
