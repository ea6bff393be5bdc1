"""DeepSeek-V3.2 and GLM-5: V3 whose tokens attend to the positions that an index selects.

Source: DeepSeek-AI, *DeepSeek-V3.2*, 2025; GLM-5 Team, *GLM-5: from Vibe Coding to Agentic Engineering*, 2026.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import attrs
from attrs.validators import ge, le
from torch import Tensor, nn

from hal import ops
from hal.nn import LatentAttention, LayerNorm, LayerState, Linear, RotaryEmbedding, check_layer_types
from hal.nn.rope_parameters import SIZE
from hal.step import TOKEN, Batch, State

from .deepseek import DeepseekV2ForCausalLM, DeepseekV3Config

INDEX_EPS = 1e-6
"""That of the norm of index keys, which no key of config.json changes."""


@attrs.frozen(kw_only=True)
class DeepseekV32Config(DeepseekV3Config):
    """The keys of V3, and those of the index.

    Attributes:
        index_topk: the number of positions that a token attends to.
        index_n_heads: the heads of index queries; there is one index key for all.
        index_head_dim: elements of an index query and key, of which the first ``qk_rope_head_dim`` are rotated.
        indexer_rope_interleave: whether the elements of a rotated pair are adjacent there.
        indexer_types: that each layer has an index.
    """

    q_lora_rank: int = attrs.field(validator=SIZE)
    index_topk: int = attrs.field(validator=SIZE)
    index_n_heads: int = attrs.field(validator=SIZE)
    index_head_dim: int = attrs.field(validator=SIZE)
    rope_interleave: Literal[True] = True
    indexer_rope_interleave: bool = False
    indexer_types: tuple[Literal["full"], ...] | None = attrs.field(default=None, validator=check_layer_types)
    index_topk_freq: Literal[1] = 1
    index_topk_pattern: Literal[""] = ""
    layer_types: tuple[Literal["indexed_attention"], ...] | None = None
    mlp_layer_types: tuple[Literal["dense", "sparse"], ...] | None = None
    attention_bias: Literal[False] = False
    mlp_bias: Literal[False] = False

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.index_head_dim < self.qk_rope_head_dim:
            raise ValueError(
                f"index_head_dim, {self.index_head_dim}, is less than qk_rope_head_dim, {self.qk_rope_head_dim}"
            )
        dense = min(self.first_k_dense_replace, self.num_hidden_layers)
        types = ("dense",) * dense + ("sparse",) * (self.num_hidden_layers - dense)
        if self.mlp_layer_types not in (None, types):
            raise ValueError(
                f"mlp_layer_types is {self.mlp_layer_types}; with first_k_dense_replace {dense}, it must be {types}"
            )


@attrs.frozen(kw_only=True)
class GlmMoeDsaConfig(DeepseekV32Config):
    """The same keys, with the defaults of GLM-5."""

    n_group: int = 1
    topk_group: int = 1
    rms_norm_eps: float = attrs.field(default=1e-5, validator=[ge(0.0), le(1.0)])
    indexer_rope_interleave: bool = True


class SelectiveAttention(LatentAttention):
    """Latent attention to the positions with the highest scores of an index, which each rank keeps whole."""

    def __init__(self, config: DeepseekV32Config, rotary: RotaryEmbedding) -> None:
        heads, width = config.index_n_heads, config.index_head_dim
        super().__init__(config, rotary, {"indexer.wk": width})
        parts = {
            "wq_b": Linear(config.q_lora_rank, heads * width),
            "weights_proj": Linear(config.hidden_size, heads),  # not merged: checkpoints in float8 do not quantize it
            "k_norm": LayerNorm(width, INDEX_EPS),
        }
        self.indexer = nn.ModuleDict(parts)
        self.index_heads, self.index_topk = heads, config.index_topk
        self.index_interleaved = config.indexer_rope_interleave
        self.states = {**self.states, "index": State(TOKEN, (width,))}

    def select(
        self,
        hidden: Tensor,
        query: Tensor,
        index: Sequence[Tensor],
        angles: tuple[Tensor, Tensor],
        batch: Batch,
        state: LayerState,
    ) -> Tensor:
        if not self.index_interleaved:  # The latents' pairs are adjacent, and so are those of the angles.
            cos, sin = (each[:, ::2].repeat(1, 2) for each in angles)
            angles = cos, sin
        query = self.indexer["wq_b"](query).unflatten(1, (self.index_heads, -1))
        key = self.indexer["k_norm"](index[0]).unsqueeze(1)
        query, key = ops.rotary_embedding(query, key, *angles, self.index_interleaved)
        ops.store_index_cache(key.squeeze(1), state["index"], batch.slot_mapping)
        weights, lengths = self.indexer["weights_proj"](hidden), (batch.query_start_loc, batch.kv_lens)
        return ops.select_keys(query, weights, state["index"], batch.block_table, *lengths, self.index_topk)


class DeepseekV32ForCausalLM(DeepseekV2ForCausalLM):
    config_type = DeepseekV32Config
    attention = SelectiveAttention


class GlmMoeDsaForCausalLM(DeepseekV32ForCausalLM):
    config_type = GlmMoeDsaConfig
