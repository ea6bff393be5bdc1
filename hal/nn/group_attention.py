"""Grouped-query attention that reads the groups of tokens that an index with pooled keys selects."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hal import ops
from hal.nn.attention import Norm
from hal.nn.block_attention import ChoosingAttention
from hal.nn.decoder_config import DecoderConfig
from hal.nn.linear import Linear
from hal.nn.model import Angles, LayerState
from hal.nn.rotary import RotaryEmbedding
from hal.step.state import SEQUENCE, TOKEN, LayerStates, State


class GroupAttention(ChoosingAttention):
    """Attention to selected groups of tokens, and to the incomplete group: an index with a key for each group.

    An index key is the mean of a group's projections, which is normalized, then rotated by the position of the group's
    first token. Each rank has the whole index. Layers share what :func:`hal.nn.Decoder.further` gives them, a dict.

    Args:
        config: the sizes.
        rotary: see :class:`ChoosingAttention`, like ``norm`` and ``index_dim``.
        norm: see there.
        index_dim: see there.
        index_heads: the number of index queries.
        budget: the number of tokens of the groups that a token attends to, a multiple of ``group``.
        group: the number of tokens of a group.
        options: further arguments of :class:`SelfAttention`.

    Source: Qwen Team, the published code of Qwen3.8-Flash-Next, 2026.
    """

    def __init__(
        self,
        config: DecoderConfig,
        rotary: RotaryEmbedding,
        *,
        norm: Norm,
        index_dim: int,
        index_heads: int,
        budget: int,
        group: int,
        **options: Any,
    ) -> None:
        selected = budget + group - 1
        super().__init__(config, rotary, norm=norm, index_dim=index_dim, selected=selected, **options)
        self.index_heads, self.budget, self.group = index_heads, budget, group
        self.indexer = nn.ModuleDict(
            {
                "index_qk_proj": Linear(config.hidden_size, (index_heads + 1) * index_dim),
                "q_layernorm": norm(index_dim),
                "k_layernorm": norm(index_dim),
            }
        )

    @property
    def states(self) -> LayerStates:
        index, tail = (
            State(TOKEN, (self.index_dim,), group=self.group),
            State(SEQUENCE, (self.group, self.index_dim), saved=True),
        )
        return {**super().states, "index": index, "tail": tail}

    def choose(self, hidden: Tensor, angles: Angles, batch: Any, state: LayerState, *further: Any) -> Tensor:
        assert angles is not None
        shared: dict[str, Any] = further[0]
        query, key = self.indexer["index_qk_proj"](hidden).tensor_split([self.index_heads * self.index_dim], dim=1)
        query = self.indexer["q_layernorm"](query.unflatten(1, (self.index_heads, -1)))
        if "slots" not in shared:
            starts = self.rotaries[0](batch.positions - (self.group - 1), hidden.dtype)
            ones = query.new_ones(query.shape[:2])
            shared |= {"slots": batch.group_slots(self.group), "starts": starts, "weights": ones}
        lengths = batch.query_start_loc, batch.kv_lens
        read_slots, write_slots = batch.state_slots
        pooled = ops.pool_groups(key, None, None, state["tail"], read_slots, write_slots, *lengths, self.group)
        pooled = self.indexer["k_layernorm"](pooled).unsqueeze(1)
        pooled = self._turned(pooled, shared["starts"]).squeeze(1)
        ops.store_index_cache(pooled, state["index"], shared["slots"])
        index = self._turned(query, angles), shared["weights"], state["index"]
        return ops.select_keys(*index, batch.block_table, *lengths, self.budget, self.group).unsqueeze(1)

    def _turned(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        return ops.rotary_embedding(x, x[:, :0], *angles, self.rotaries[0].interleaved)[0]
