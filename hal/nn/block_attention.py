"""Grouped-query attention in which each key head reads the blocks of tokens that an index selects for it."""

from __future__ import annotations

import math
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from hal import ops
from hal.errors import ConfigError
from hal.nn.attention import Attention, Norm, SelfAttention
from hal.nn.decoder_config import DecoderConfig
from hal.nn.linear import OUT, Linear
from hal.nn.model import Angles, LayerState
from hal.nn.rotary import RotaryEmbedding
from hal.nn.weights.weight import Share
from hal.step.batch import Batch
from hal.step.state import TOKEN, LayerStates, State


class _PlainCache(Attention):
    """The states of attention to selected positions, which reads keys and values in the model's dtype only."""

    def quantize_cache(self, dtype: torch.dtype | None, **options: Any) -> None:
        if dtype is not None:
            raise ConfigError(
                "the cache is to be kept in 8 bits, and attention to selected blocks reads it in the model's dtype",
                "leave cache.dtype out",
            )


class BlockAttention(SelfAttention):
    """Attention to selected blocks of tokens: an index with one key for all, and a query for each key head.

    Ranks share the queries of the index as they do the key heads, and each keeps all index keys.

    Args:
        config: the sizes.
        rotary: the rotary embedding, which also rotates the first elements of the index.
        norm: makes the norms of queries and keys, also those of the index.
        index_dim: elements of an index query and key.
        top: the number of blocks that a token attends to with a key head.
        group: the number of tokens of a block.
        local: the number of last blocks that a token attends to in any case.

    Raises:
        ConfigError: the index has fewer elements than are rotated.

    Source: MiniMax, the published code of MiniMax-M3, 2026.
    """

    def __init__(
        self,
        config: DecoderConfig,
        rotary: RotaryEmbedding,
        *,
        norm: Norm,
        index_dim: int,
        top: int,
        group: int,
        local: int,
    ) -> None:
        if index_dim < rotary.width:
            raise ConfigError(
                f"index_head_dim, {index_dim}, is less than the {rotary.width} rotated elements of a head",
                "correct index_head_dim, or the part of a head that is rotated",
            )
        super().__init__(config, rotary, norm=norm)
        heads = config.num_key_value_heads
        self.attention = _PlainCache(heads, self.head_dim, self.attention.options)
        self.index_dim, self.selection = index_dim, (top, group, local)
        by_head = Share(index_dim, repeat=True)
        self.indexer = nn.ModuleDict(
            {
                "q_proj": Linear(config.hidden_size, heads * index_dim, shard=OUT, share=by_head),
                "k_proj": Linear(config.hidden_size, index_dim),
                "q_norm": norm(index_dim),
                "k_norm": norm(index_dim),
            }
        )

    @property
    def states(self) -> LayerStates:
        read = math.prod(self.selection[:2])
        selected = {name: attrs.evolve(each, selected=read) for name, each in self.attention.states.items()}
        return {**selected, "index": State(TOKEN, (self.index_dim,))}

    def attend(
        self,
        hidden: Tensor,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        angles: Angles,
        batch: Batch,
        state: LayerState,
    ) -> Tensor:
        """Store keys, values and index keys, select, and return the result of attention."""
        assert key is not None
        assert value is not None
        assert angles is not None
        self.attention.store(key, value, batch, state)
        index_query, index_key = (
            self.indexer[f"{name}_norm"](self.indexer[f"{name}_proj"](hidden).unflatten(1, (-1, self.index_dim)))
            for name in ("q", "k")
        )
        index_query, index_key = ops.rotary_embedding(index_query, index_key, *angles, self.rotaries[0].interleaved)
        ops.store_index_cache(index_key.squeeze(1), state["index"], batch.slot_mapping)
        places = batch.block_table, batch.query_start_loc
        chosen = ops.select_blocks(index_query, state["index"], *places, batch.kv_lens, *self.selection)
        cache, scale = (state["key"], state["value"]), self.attention.options.scale
        return ops.attend_chosen(query, *cache, chosen, *places, scale).flatten(1)
