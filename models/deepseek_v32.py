"""DeepSeek-V3.2: V3 whose tokens attend to the positions that an index selects.

Source: DeepSeek-AI, *DeepSeek-V3.2*, 2025.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import attrs
from torch import Tensor, nn

from hal import ops
from hal.nn import Angles, Decoder, LatentAttention, LayerNorm, LayerState, Linear, RotaryEmbedding
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
    """

    q_lora_rank: int = attrs.field(validator=SIZE)
    index_topk: int = attrs.field(validator=SIZE)
    index_n_heads: int = attrs.field(validator=SIZE)
    index_head_dim: int = attrs.field(validator=SIZE)
    rope_interleave: Literal[True] = True
    indexer_rope_interleave: bool = False
    layer_types: tuple[Literal["indexed_attention"], ...] | None = None
    mlp_layer_types: tuple[Literal["dense", "sparse"], ...] | None = None
    attention_bias: Literal[False] = False
    mlp_bias: Literal[False] = False

    least_rotated: ClassVar[int] = 1

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        width, rotated = self.index_head_dim, self.qk_rope_head_dim
        if not self.least_rotated <= rotated <= width:
            raise ValueError(f"qk_rope_head_dim is {rotated}; an index needs 1 or more, up to index_head_dim, {width}")
        types = tuple("dense" if self.dense(each) else "sparse" for each in range(self.num_hidden_layers))
        if self.mlp_layer_types not in (None, types):
            dense = self.first_k_dense_replace
            raise ValueError(
                f"mlp_layer_types is {self.mlp_layer_types}; with first_k_dense_replace {dense}, it must be {types}"
            )

    @property
    def indexed(self) -> Sequence[bool]:
        """Whether each layer has an index; one without attends to what the last layer with one selected."""
        return [True] * self.num_hidden_layers

    def mixer(self, layer: int, rotary: Any) -> LatentAttention:
        predicts = layer >= self.num_hidden_layers
        return SelectiveAttention(self, rotary, indexed=predicts or self.indexed[layer])


class SelectiveAttention(LatentAttention):
    """Latent attention to the positions with the highest scores of an index, which each rank keeps whole."""

    def __init__(self, config: DeepseekV32Config, rotary: RotaryEmbedding | None, *, indexed: bool = True) -> None:
        heads, width = config.index_n_heads, config.index_head_dim
        super().__init__(config, rotary, {"indexer.wk": width} if indexed else {})
        self.indexed, self.index_heads, self.index_topk = indexed, heads, config.index_topk
        self.index_interleaved = config.indexer_rope_interleave
        self.states = {name: attrs.evolve(each, selected=self.index_topk) for name, each in self.states.items()}
        if indexed:
            parts = {
                "wq_b": Linear(config.q_lora_rank, heads * width),
                "weights_proj": Linear(config.hidden_size, heads),  # not merged: checkpoints in float8 keep it wide
                "k_norm": LayerNorm(width, INDEX_EPS),
            }
            self.indexer = nn.ModuleDict(parts)
            self.states = {**self.states, "index": State(TOKEN, (width,))}

    def select(
        self,
        hidden: Tensor,
        query: Tensor,
        index: Sequence[Tensor],
        angles: Angles,
        batch: Batch,
        state: LayerState,
        shared: dict[str, Tensor],
    ) -> Tensor:
        if self.indexed:
            assert angles is not None
            if not self.index_interleaved and "cos" not in shared:  # The latents' pairs are adjacent.
                shared["cos"], shared["sin"] = (each[:, ::2].repeat(1, 2) for each in angles)
            cos, sin = angles if self.index_interleaved else (shared["cos"], shared["sin"])
            query = self.indexer["wq_b"](query).unflatten(1, (self.index_heads, -1))
            key = self.indexer["k_norm"](index[0]).unsqueeze(1)
            query, key = ops.rotary_embedding(query, key, cos, sin, self.index_interleaved)
            ops.store_index_cache(key.squeeze(1), state["index"], batch.slot_mapping)
            weights, places = self.indexer["weights_proj"](hidden), (batch.block_table, batch.query_start_loc)
            keys = state["index"], *places, batch.kv_lens
            shared["selected"] = ops.select_keys(query, weights, *keys, self.index_topk)
        return shared["selected"]


class SelectiveDecoder(Decoder):
    """A decoder whose layers share what one of them computes: the selection, and the angles of the index."""

    def further(self, batch: Batch, embeddings: Tensor) -> Sequence[tuple[Any, ...]]:
        shared: dict[str, Tensor] = {}
        return [(shared,)] * len(self.layers)


class DeepseekV32ForCausalLM(DeepseekV2ForCausalLM):
    config_type = DeepseekV32Config
    decoder = SelectiveDecoder
