"""DeepSeek-V4: residual streams, attention to a window and to entries that stand for groups of tokens, and experts.

| part | layers | where |
|---|---|---|
| residual | all: streams that hyper-connections mix, and their weighted sum last | `HyperDecoderLayer`, `StreamHead` |
| mixer | those with entries of 4 tokens, some of which an index selects | `CompressedAttention` |
| mixer | those with entries of 128 tokens, all of which are read | `CompressedAttention` |
| mixer | those with a window alone | `CompressedAttention` |
| MLP | the first ones: the experts that a table has for each token, and a shared one | `V4Router`, `SparseMLP` |
| MLP | the others: the experts with the highest scores, and a shared one | `V4Router`, `SparseMLP` |

Source: DeepSeek-AI, *DeepSeek-V4*, 2026.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor

from hal import ops
from hal.nn import (
    SLIDING,
    Decoder,
    DecoderLM,
    GatedMLP,
    HyperConnection,
    HyperDecoderLayer,
    RotaryEmbedding,
    Router,
    SparseMLP,
    StreamHead,
    ValueCheck,
    Weight,
    limited_silu_and_mul,
)
from hal.step import Batch

from .deepseek_v4_attention import CompressedAttention
from .deepseek_v4_config import DeepseekV4Config


class V4Router(Router):
    """A router whose scores are square roots of softplus, and which may take a token's experts from a table.

    Args:
        config: the sizes.
        table: whether ``tid2eid`` has the experts of each token of the vocabulary.
    """

    def __init__(self, config: DeepseekV4Config, *, table: bool) -> None:
        count, taken = config.n_routed_experts, config.num_experts_per_tok
        how: dict[str, Any] = {"scale": config.routed_scaling_factor, "dtype": torch.float32, "wide_weights": True}
        super().__init__(config.hidden_size, count, taken, renormalize=True, correction=not table, **how)
        self.tid2eid: Tensor | None
        shape = config.vocab_size, taken
        self.register_buffer("tid2eid", torch.empty(shape, dtype=torch.int32) if table else None)

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The declarations of its tensors."""
        known = ValueCheck(
            lambda values: bool(((values >= 0) & (values < self.out_features)).all()),
            f"names an expert that is none of the {self.out_features}",
            "use an undamaged checkpoint",
        )
        stored = (torch.int64, torch.int32)
        table = Weight(("tid2eid",), "tokens_of_vocabulary taken", dtype=torch.int32, stored=stored, checks=(known,))
        return {**super().weights, "tid2eid": table}

    def route(self, scores: Tensor, *further: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and the numbers of each token's experts; the further argument is the tokens."""
        chosen = None if self.tid2eid is None else self.tid2eid[further[0]]
        return ops.softplus_route(scores, self.e_score_correction_bias, chosen, self.top_k, self.factor)

    def weigh(self, scores: Tensor, experts: Tensor) -> Tensor:
        """Return the weights of given experts."""
        return ops.softplus_route(scores, None, experts, self.top_k, self.factor)[0]


class V4Layer(HyperDecoderLayer):
    """A layer whose MLP also reads the tokens."""

    def feed_forward(self, hidden: Tensor, normed: Tensor, batch: Batch) -> Tensor:
        output: Tensor = self.mlp(normed, batch.token_ids)
        return output


class V4Decoder(Decoder):
    """A decoder whose layers share the angles and slots of entries."""

    def further(self, batch: Batch, embeddings: Tensor) -> Sequence[tuple[Any, ...]]:
        shared: dict[int, Any] = {}
        return [(shared,)] * len(self.layers)


class DeepseekV4ForCausalLM(DecoderLM):
    decoder = V4Decoder
    ignored_prefixes: tuple[str, ...] = ("mtp.", "model.mtp.")
    other_names = MappingProxyType(
        {
            "embed.weight": "embed_tokens.weight",
            "head.weight": "lm_head.weight",
            "hc_head_": "hc_head.hc_",
            ".hc_attn_": ".attn_hc.",
            ".hc_ffn_": ".ffn_hc.",
            ".attn_norm.": ".input_layernorm.",
            ".ffn_norm.": ".post_attention_layernorm.",
            ".attn.": ".self_attn.",
            ".ffn.": ".mlp.",
            ".attn_sink": ".sinks",
            ".compressor.indexer.scorer.": ".indexer.",
            ".compressor.indexer.q_b_": ".indexer.q_b_",
            ".compressor.indexer.": ".indexer.compressor.",
            ".compressor.norm.": ".compressor.kv_norm.",
            ".self_attn.norm.": ".self_attn.kv_norm.",
            ".ape": ".position_bias",
            ".wq_a.": ".q_a_proj.",
            ".wq_b.": ".q_b_proj.",
            ".wkv.": ".kv_proj.",
            ".wgate.": ".gate_proj.",
            ".wo_a.": ".o_a_proj.",
            ".wo_b.": ".o_b_proj.",
            ".q_norm.": ".q_a_norm.",
            ".gate.bias": ".gate.e_score_correction_bias",
            ".shared_experts.w1.": ".shared_experts.gate_proj.",
            ".shared_experts.w2.": ".shared_experts.down_proj.",
            ".shared_experts.w3.": ".shared_experts.up_proj.",
        }
    )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        v4 = DeepseekV4Config.from_config(config)
        main, compressed = (RotaryEmbedding(v4.head_dim, each, interleaved=True) for each in (v4.main_rope, v4.rope))
        swiglu, width = partial(limited_silu_and_mul, limit=v4.swiglu_limit), v4.moe_intermediate_size

        def layer(attention: str, experts: str) -> V4Layer:
            mixer = CompressedAttention(v4, main if attention == SLIDING else compressed, attention)
            shared = GatedMLP(v4.hidden_size, width, activation=swiglu)
            router, names = V4Router(v4, table=experts == "hash_moe"), ("w1", "w3", "w2")
            mlp = SparseMLP(router, width, shared_experts=shared, names=names, activation=swiglu)
            return V4Layer(v4, mixer, mlp, connection=connection)

        connection = partial(HyperConnection, v4.hidden_size, v4.hc_mult, v4.connection)
        head = StreamHead(v4.hidden_size, v4.hc_mult, v4.rms_norm_eps, v4.hc_eps)
        return cls(v4, map(layer, v4.layer_types, v4.mlp_layer_types), streams=head)
