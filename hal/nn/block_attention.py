"""Grouped-query attention to the positions that an index selects, for all key heads or for each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from hal import ops
from hal.errors import ConfigError
from hal.nn.attention import Attention, Norm, SelfAttention
from hal.nn.choices import POSITIONS, Choice, chosen
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
                "the cache is to be kept in 8 bits, and attention to selected positions reads it in the model's dtype",
                "leave cache.dtype out",
            )


class ChoosingAttention(SelfAttention, ABC):
    """Attention to the positions that an index selects for all key heads, or for each.

    Args:
        config: the sizes.
        rotary: the rotary embedding, which also rotates the first elements of the index.
        norm: makes the norms of queries and keys, also those of the index.
        index_dim: elements of an index query and key.
        selected: the most positions that a token attends to.

    Raises:
        ConfigError: the index has fewer elements than are rotated.
    """

    kept_choice: str | None = None

    def __init__(
        self,
        config: DecoderConfig,
        rotary: RotaryEmbedding,
        *,
        norm: Norm,
        index_dim: int,
        selected: int,
        **options: Any,
    ) -> None:
        if index_dim < rotary.width:
            raise ConfigError(
                f"an index query has {index_dim} elements, less than the {rotary.width} rotated ones of a head",
                "correct the size of the index in config.json, or the part of a head that is rotated",
            )
        super().__init__(config, rotary, norm=norm, **options)
        self.attention = _PlainCache(config.num_key_value_heads, self.head_dim, self.attention.options)
        self.index_dim, self.selected = index_dim, selected

    @property
    def states(self) -> LayerStates:
        selected = self.attention.states.items()
        return {name: attrs.evolve(each, selected=self.selected) for name, each in selected}

    @property
    def chooses(self) -> Choice | None:
        """What is recorded and replayed of it."""
        return Choice(POSITIONS, (1, self.selected))

    @abstractmethod
    def choose(self, hidden: Tensor, angles: Angles, batch: Any, state: LayerState, *further: Any) -> Tensor:
        """Store index keys, and return the positions that :func:`hal.ops.attend_chosen` reads."""

    def attend(
        self,
        hidden: Tensor,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        angles: Angles,
        batch: Batch,
        state: LayerState,
        *further: Any,
    ) -> Tensor:
        """Store keys, values and index keys, select, and return the result of attention."""
        assert key is not None
        assert value is not None
        self.attention.store(key, value, batch, state)
        selected = chosen(self, self.choose(hidden, angles, batch, state, *further))
        cache, places = (state["key"], state["value"]), (batch.block_table, batch.query_start_loc)
        return ops.attend_chosen(query, *cache, selected, *places, self.attention.options.scale).flatten(1)


class BlockAttention(ChoosingAttention):
    """Attention to selected blocks of tokens: an index with one key for all, and a query for each key head.

    Ranks share the queries of the index as they do the key heads, and each keeps all index keys.

    Args:
        config: the sizes.
        rotary: see :class:`ChoosingAttention`, like ``norm`` and ``index_dim``.
        norm: see there.
        index_dim: see there.
        top: the number of blocks that a token attends to with a key head.
        group: the number of tokens of a block.
        local: the number of last blocks that a token attends to in any case.

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
        super().__init__(config, rotary, norm=norm, index_dim=index_dim, selected=top * group)
        heads, by_head = config.num_key_value_heads, Share(index_dim, repeat=True)
        self.selection = top, group, local
        self.indexer = nn.ModuleDict(
            {
                "q_proj": Linear(config.hidden_size, heads * index_dim, shard=OUT, share=by_head),
                "k_proj": Linear(config.hidden_size, index_dim),
                "q_norm": norm(index_dim),
                "k_norm": norm(index_dim),
            }
        )

    @property
    def chooses(self) -> Choice | None:
        """What is recorded and replayed of it; None if ranks share its heads."""
        heads = self.attention.num_kv_heads
        return Choice(POSITIONS, (heads, self.selected)) if self.attention.states["key"].shape[0] == heads else None

    @property
    def states(self) -> LayerStates:
        return {**super().states, "index": State(TOKEN, (self.index_dim,))}

    def choose(self, hidden: Tensor, angles: Angles, batch: Any, state: LayerState, *further: Any) -> Tensor:
        assert angles is not None
        query, key = (
            self.indexer[f"{name}_norm"](self.indexer[f"{name}_proj"](hidden).unflatten(1, (-1, self.index_dim)))
            for name in ("q", "k")
        )
        query, key = ops.rotary_embedding(query, key, *angles, self.rotaries[0].interleaved)
        ops.store_index_cache(key.squeeze(1), state["index"], batch.slot_mapping)
        places = batch.block_table, batch.query_start_loc, batch.kv_lens
        return ops.select_blocks(query, state["index"], *places, *self.selection)
