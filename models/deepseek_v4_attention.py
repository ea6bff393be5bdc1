"""DeepSeek-V4's attention: a window of tokens, and beside it entries that each stand for a group of tokens.

Source: DeepSeek-AI, *DeepSeek-V4*, 2026.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from hal import ops
from hal.nn import (
    SLIDING,
    AbsorbedLinear,
    Angles,
    LayerState,
    Linear,
    MergedLinear,
    RMSNorm,
    RotaryEmbedding,
    Share,
    Weight,
)
from hal.ops import AttentionOptions
from hal.step import SEQUENCE, TOKEN, SlotBatch, State

from .deepseek_v4_config import SPARSE, DeepseekV4Config


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the last elements of each head, ``[tokens, heads, head_dim]``; pairs are adjacent."""
    width = cos.shape[-1]
    still, moved = x.split((x.shape[-1] - width, width), dim=-1)
    return torch.cat((still, ops.rotary_embedding(moved, moved[:, :0], cos, sin, True)[0]), dim=-1)


class Compressor(nn.Module):
    """Pools each complete group of tokens into an entry, which it normalizes, rotates by the group's start and stores.

    Args:
        config: the sizes.
        dim: elements of an entry.
        group: the tokens of a group.
        span: the number of groups that an entry reads.
    """

    def __init__(self, config: DeepseekV4Config, dim: int, group: int, span: int) -> None:
        super().__init__()
        features = span * dim
        self.group, self.span = group, span
        self.kv_gate_proj = MergedLinear(config.hidden_size, {"kv_proj": features, "gate_proj": features}, shard=None)
        self.position_bias = nn.Parameter(torch.empty(group, features), requires_grad=False)
        self.kv_norm = RMSNorm(dim, config.rms_norm_eps)
        self.states = {
            "entries": State(TOKEN, (dim,), group=group),
            "tail": State(SEQUENCE, (span * group, 2 * features), saved=True),
        }

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The declaration of the biases."""
        return {"position_bias": Weight(("position_bias",), "places features", dtype=torch.float32)}

    def forward(
        self, hidden: Tensor, starts: tuple[Tensor, Tensor], slots: Tensor, batch: SlotBatch, state: LayerState
    ) -> None:
        """Store the entries that the tokens complete; ``starts`` are the angles of their groups' first tokens."""
        values, gate = self.kv_gate_proj(hidden).chunk(2, dim=-1)
        tail = state["tail"], *batch.state_slots, batch.query_start_loc, batch.kv_lens
        pooled = ops.pool_groups(values, gate, self.position_bias, *tail, self.group, self.span)
        entries = turn(self.kv_norm(pooled).unsqueeze(1), *starts).squeeze(1)
        ops.store_index_cache(entries, state["entries"], slots)


class CompressedAttention(nn.Module):
    """Attention to a window, and to entries: those that an index selects, or all. Keys are values, for all heads.

    Ranks share the groups of heads, and each keeps all latents and entries.

    Args:
        config: the sizes.
        rotary: the rotary embedding of the layer's type.
        layer_type: says whether there are entries, and an index.
    """

    causal: bool = True

    def __init__(self, config: DeepseekV4Config, rotary: RotaryEmbedding, layer_type: str) -> None:
        super().__init__()
        heads, self.head_dim, eps = config.num_attention_heads, config.head_dim, config.rms_norm_eps
        together = Share(heads // config.o_groups * self.head_dim)
        self.rotaries, self.group = (rotary,), config.group(layer_type)
        self.latents = {"q_a_proj": config.q_lora_rank, "kv_proj": self.head_dim}
        self.latent_proj = MergedLinear(config.hidden_size, self.latents, shard=None)
        self.q_a_norm, self.kv_norm = RMSNorm(config.q_lora_rank, eps), RMSNorm(self.head_dim, eps)
        self.q_b_proj = Linear(config.q_lora_rank, heads * self.head_dim, shard="out_features", share=together)
        self.q_b_norm = RMSNorm(self.head_dim, eps, learned=False)
        self.sinks = nn.Parameter(torch.empty(heads), requires_grad=False)
        self.sinks_share = Share(heads // config.o_groups)
        rank = config.o_lora_rank
        self.o_a_proj = AbsorbedLinear(together.unit, config.o_groups, rank, 0)
        self.o_b_proj = Linear(config.o_groups * rank, config.hidden_size, shard="in_features", share=Share(rank))
        self.options = AttentionOptions(self.head_dim**-0.5, config.sliding_window)
        self.states = {"latent": State(TOKEN, (self.head_dim,), window=config.sliding_window)}
        self.compressor: Compressor | None = None
        self.indexer: Indexer | None = None
        if layer_type != SLIDING:
            self.compressor = Compressor(config, self.head_dim, self.group, 1 + (layer_type == SPARSE))
            self.states |= self.compressor.states
        if layer_type == SPARSE:
            self.indexer, read = Indexer(config, self.group), config.index_topk * self.group
            self.states["entries"] = attrs.evolve(self.states["entries"], selected=read)
            self.states |= {f"index_{name}": each for name, each in self.indexer.compressor.states.items()}

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The declaration of the sinks."""
        return {"sinks": Weight(("sinks",), "heads", "heads", share=self.sinks_share)}

    def split(self, tensor: Any) -> None:
        """Compute this rank's heads from now on, which the projections say."""

    def forward(
        self, hidden: Tensor, angles: Angles, batch: SlotBatch, state: LayerState, shared: dict[int, Any]
    ) -> Tensor:
        """Map ``[tokens, hidden_size]`` to the same shape; ``shared`` has what layers with equal groups share."""
        assert angles is not None
        cos, sin = angles
        low, latent = self.latent_proj(hidden).split(tuple(self.latents.values()), dim=-1)
        low = self.q_a_norm(low)
        query = turn(self.q_b_norm(self.q_b_proj(low).unflatten(1, (-1, self.head_dim))), cos, sin)
        latent = turn(self.kv_norm(latent).unsqueeze(1), cos, sin)
        ops.store_index_cache(latent.squeeze(1), state["latent"], batch.slot_mapping)
        attended = self.attend(hidden, low, query, angles, batch, state, shared)
        grouped = turn(attended, cos, -sin).flatten(1).unflatten(1, (-1, self.o_a_proj.in_features))
        return self.o_b_proj(ops.head_linear(grouped, self.o_a_proj.by_head[0].transpose(1, 2)).flatten(1))

    def attend(
        self,
        hidden: Tensor,
        low: Tensor,
        query: Tensor,
        angles: tuple[Tensor, Tensor],
        batch: SlotBatch,
        state: LayerState,
        shared: dict[int, Any],
    ) -> Tensor:
        """Store the entries, select some, and return the result of attention, ``[tokens, heads, head_dim]``."""
        lengths = batch.query_start_loc, batch.kv_lens
        if self.compressor is None:
            cache = state["latent"].unsqueeze(2)
            on_host = batch.query_start_loc_host, batch.kv_lens_host
            return ops.paged_attention(
                query, cache, cache, batch.block_table, *lengths, *on_host, self.sinks, self.options
            )
        if self.group not in shared:
            first = batch.positions - (self.group - 1)
            shared[self.group] = self.rotaries[0](first, hidden.dtype), batch.group_slots(self.group)
        self.compressor(hidden, *shared[self.group], batch, state)
        entries = None
        if self.indexer is not None:
            own = {name: state[f"index_{name}"] for name in self.indexer.compressor.states}
            self.indexer.compressor(hidden, *shared[self.group], batch, own)
            entries = self.indexer(hidden, low, angles, batch, own["entries"])
        given = state["entries"], entries, self.sinks, batch.block_table, *lengths, self.group
        assert self.options.window is not None
        return ops.attend_compressed(query, state["latent"], *given, self.options.window, self.options.scale)


class Indexer(nn.Module):
    """Selects the entries that each token attends to, by smaller entries of the same groups."""

    def __init__(self, config: DeepseekV4Config, group: int) -> None:
        super().__init__()
        self.heads, self.budget, self.group = config.index_n_heads, config.index_topk, group
        self.compressor = Compressor(config, config.index_head_dim, group, 2)
        self.q_b_proj = Linear(config.q_lora_rank, self.heads * config.index_head_dim)
        self.weights_proj = Linear(config.hidden_size, self.heads)

    def forward(
        self, hidden: Tensor, low: Tensor, angles: tuple[Tensor, Tensor], batch: SlotBatch, cache: Tensor
    ) -> Tensor:
        """Return the selected entries, ``[tokens, index_topk]``, int32, then -1."""
        query = turn(self.q_b_proj(low).unflatten(1, (self.heads, -1)), *angles)
        places = cache, batch.block_table, batch.query_start_loc, batch.kv_lens
        tokens = ops.select_keys(query, self.weights_proj(hidden), *places, self.budget * self.group, self.group)
        # The first token of each selected group; those of an incomplete group follow.
        entries = tokens[:, : self.budget * self.group : self.group] // self.group
        complete = (batch.positions + 1) // self.group
        return torch.where(entries < complete.unsqueeze(1), entries, -1).to(torch.int32)
