"""Qwen3.8-Flash-Next, its text model: recurrent layers, and gated attention to groups of tokens that an index selects.

| part | layers | where |
|---|---|---|
| residual | all: streams, of which each part reads a mean by a gate of low rank | `GatedConnection`, `GatedMean` |
| mixer | three of four: a gated delta network, as in Qwen3.5 | `GatedDeltaNet` |
| mixer | the others: gated attention to the groups with the highest scores, and the last tokens | `GroupAttention` |
| MLP | all: experts, and one that every token takes, scaled by a gate | `SparseMLP` |
| before it | some recurrent ones: embeddings of n-grams, and their dilated convolution | `NgramLayer` |

Source: Qwen Team, the published code of Qwen3.8-Flash-Next, 2026.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Self

from torch import Tensor, nn

from hal.nn import (
    FULL,
    Angles,
    Decoder,
    DecoderLM,
    GatedConnection,
    GatedDeltaNet,
    GatedMean,
    GroupAttention,
    HyperDecoderLayer,
    LayerNorms,
    LayerState,
    Mixer,
    RMSNorm,
    RotaryEmbedding,
    text_config,
)

from .qwen3_5 import IMAGES, Qwen35LM
from .qwen4_exp_config import Qwen4ExpConfig
from .qwen4_exp_ngrams import NgramLayer


class Qwen4ExpLayer(HyperDecoderLayer):
    """A layer that may first add embeddings of n-grams to the streams."""

    def __init__(self, *parts: Any, ple: NgramLayer | None, **options: Any) -> None:
        super().__init__(*parts, norms=LayerNorms(), **options)
        self.ple = ple

    @property
    def states(self) -> Mapping[str, Any]:
        return {**super().states, **(self.ple.states if self.ple is not None else {})}

    def forward(self, hidden: Tensor, angles: Angles, batch: Any, state: LayerState, *further: Any) -> Tensor:
        if self.ple is not None:
            hidden = self.ple(hidden, batch, state)
        return super().forward(hidden, angles, batch, state, *further)


class Qwen4ExpDecoder(Decoder):
    """A decoder whose layers with an index share the angles and slots of groups."""

    def further(self, batch: Any, embeddings: Tensor) -> Sequence[tuple[Any, ...]]:
        shared: dict[str, Any] = {}
        return [(shared,) if isinstance(each.self_attn, GroupAttention) else () for each in self.layers]


class Qwen4ExpForCausalLM(DecoderLM):
    """The text model, from its own checkpoint, or from that of a model that also reads images."""

    decoder = Qwen4ExpDecoder
    other_names = MappingProxyType(
        {
            **Qwen35LM.other_names,
            "model.language_model.": "model.",
            ".attn_hyper_connection.": ".attn_hc.",
            ".mlp_hyper_connection.": ".ffn_hc.",
            ".hyper_connection_mixer.": ".hc_head.",
        }
    )
    ignored = (*DecoderLM.ignored, ".layer_multipliers", ".ngram_heads_vocab_sizes", ".ngram_heads_offsets")
    ignored_prefixes: tuple[str, ...] = ("mtp.", *IMAGES)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        qwen = Qwen4ExpConfig.from_config(text_config(config) if "text_config" in config else config)
        rotary, norm = RotaryEmbedding(qwen.head_dim, qwen.rope), partial(RMSNorm, eps=qwen.rms_norm_eps, offset=1.0)
        streams = qwen.hidden_size, qwen.hc_count, qwen.hc_lowrank, qwen.rms_norm_eps
        index: dict[str, Any] = {
            "index_heads": qwen.indexer_n_heads,
            "index_dim": qwen.indexer_head_dim,
            "budget": qwen.indexer_budget,
            "group": qwen.indexer_compress_ratio,
        }

        def layer(number: int) -> Qwen4ExpLayer:
            mixer: Mixer
            if qwen.types[number] == FULL:
                mixer = GroupAttention(qwen, rotary, norm=norm, gate=True, **index)
            else:
                mixer = GatedDeltaNet(qwen, Qwen35LM.projections, activation=qwen.output_gate_type)
            places = qwen.ple_layer_ids
            ple = NgramLayer(qwen, places.index(number + 1)) if number + 1 in places else None
            return Qwen4ExpLayer(qwen, mixer, qwen.mlp(number), connection=partial(GatedConnection, *streams), ple=ple)

        layers = map(layer, range(qwen.num_hidden_layers))
        return cls(qwen, layers, norm=nn.Identity, streams=GatedMean(*streams))
