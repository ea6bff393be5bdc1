"""MiniMax-M3, its text model: layers whose key heads each attend to the blocks of tokens that an index selects.

Source: MiniMax, the published code of MiniMax-M3, 2026.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Self

from hal import ops
from hal.nn import (
    BlockAttention,
    DecoderLayer,
    DecoderLM,
    GatedMLP,
    RMSNorm,
    RotaryEmbedding,
    Router,
    SelfAttention,
    SparseMLP,
    text_config,
)

from .minimax_m3_config import SPARSE, MiniMaxM3Config


class MiniMaxM3ForCausalLM(DecoderLM):
    other_names = MappingProxyType(
        {
            **{f".index_{part}.": f".indexer.{part}." for part in ("q_proj", "k_proj", "q_norm", "k_norm")},
            ".block_sparse_moe.e_score": ".mlp.gate.e_score",
            ".block_sparse_moe.": ".mlp.",
        }
    )
    ignored_prefixes: tuple[str, ...] = ("mtp.",)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        m3 = MiniMaxM3Config.from_config(config)
        rotary, norm = RotaryEmbedding(m3.head_dim, m3.rope), partial(RMSNorm, eps=m3.rms_norm_eps, offset=1.0)
        swiglu = partial(ops.clipped_silu_and_mul, alpha=m3.swiglu_alpha, limit=m3.swiglu_limit, interleaved=False)
        dense = partial(GatedMLP, m3.hidden_size, activation=swiglu)
        how: dict[str, Any] = {
            "sigmoid": True,
            "renormalize": True,
            "correction": True,
            "scale": m3.routed_scaling_factor,
        }
        budget = {"top": m3.index_topk_blocks, "group": m3.index_block_size, "local": m3.index_local_blocks}

        def layer(index: int) -> DecoderLayer:
            attention: Any = partial(SelfAttention, m3, rotary, norm=norm)
            if m3.layer_types and m3.layer_types[index] == SPARSE:
                attention = partial(BlockAttention, m3, rotary, norm=norm, index_dim=m3.index_head_dim, **budget)
            if m3.mlp_layer_types and m3.mlp_layer_types[index] == "dense":
                return DecoderLayer(m3, attention(), dense(m3.dense_intermediate_size), norm=norm)
            router = Router(m3.hidden_size, m3.num_local_experts, m3.num_experts_per_tok, wide_weights=True, **how)
            shared, names = dense(m3.shared_intermediate_size), ("w1", "w3", "w2")
            mlp = SparseMLP(router, m3.intermediate_size, shared_experts=shared, names=names, activation=swiglu)
            return DecoderLayer(m3, attention(), mlp, norm=norm)

        return cls(m3, map(layer, range(m3.num_hidden_layers)), norm=norm)


class MiniMaxM3ForConditionalGeneration(MiniMaxM3ForCausalLM):
    """The text model of a checkpoint that can also read images."""

    other_names = MappingProxyType(
        {**MiniMaxM3ForCausalLM.other_names, "language_model.lm_head.": "lm_head.", "language_model.model.": "model."}
    )
    ignored_prefixes = ("mtp.", "vision_tower.", "multi_modal_projector.", "patch_merge_mlp.")

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return super().from_config(text_config(config))
