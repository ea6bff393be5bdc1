"""Sparse attention: an index selects keys, and an attention reads the selected ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from hal.errors import OperationError
from hal.ops.attention import owners
from hal.ops.declaration.constraints import Draw, Sample
from hal.ops.declaration.dtypes import FLOATING
from hal.ops.declaration.operation import op

_INDEX_CACHE = "num_blocks block_size index_dim"
PAST_THE_END = torch.iinfo(torch.int32).max


def _store_samples(draw: Draw) -> Iterator[Sample]:
    for tokens, index_dim, block_size in ((1, 64, 8), (13, 128, 8), (5, 32, 16)):
        blocks = tokens // block_size + 2
        slots = draw.permutation(blocks * block_size)[:tokens].to(torch.int32)
        yield draw.normal(tokens, 2 * index_dim)[:, index_dim:], draw.normal(blocks, block_size, index_dim), slots


@op(
    samples=_store_samples,
    axes={"key": "tokens index_dim", "index_cache": _INDEX_CACHE},
    dtypes={"key": FLOATING, "index_cache": "key"},
    rowwise="tokens",
    state=("index_cache",),
    mutates=("index_cache",),
)
def store_index_cache(key: Tensor, index_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write each token's index key into its slot, as :func:`store_kv_cache` writes keys and values.

    Args:
        key: ``[tokens, index_dim]``, of the cache's dtype.
        index_cache: ``[num_blocks, block_size, index_dim]``, contiguous; written in place.
        slot_mapping: as of :func:`store_kv_cache`.
    """
    index_cache.view(-1, index_cache.shape[-1])[slot_mapping.long()] = key


def paged_places(
    draw: Draw, query_lens: Sequence[int], kv_lens: Sequence[int], block_size: int
) -> tuple[int, Tensor, Tensor, Tensor]:
    """Return a number of blocks, a block table, ``query_start_loc`` and ``kv_lens``, for samples."""
    widest = max(-(-length // block_size) for length in kv_lens) + 1
    blocks = draw.permutation(widest * len(kv_lens) + 1)[: widest * len(kv_lens)]
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32).to(draw.device)
    return len(blocks) + 1, blocks.view(len(kv_lens), widest), starts, draw.tensor(kv_lens, torch.int32)


def _select_samples(draw: Draw) -> Iterator[Sample]:
    for query_lens, kv_lens, heads, index_dim, block_size, budget, group in (
        ([1], [1], 2, 32, 16, 4, 1),
        ([5, 17, 1], [5, 17, 1], 4, 64, 16, 7, 1),  # prefill
        ([3, 16], [21, 48], 1, 64, 16, 8, 1),  # prefill after a cached prefix
        ([1, 1, 1, 1], [33, 16, 1, 90], 6, 128, 16, 20, 1),  # decode
        ([1, 1, 1], [20, 0, 0], 4, 64, 8, 100, 1),  # decode with padding rows, and a budget for all
        ([2, 1], [40, 150], 64, 128, 32, 64, 1),
        ([6, 1], [30, 61], 4, 40, 8, 12, 4),
        ([9, 2], [9, 23], 3, 64, 16, 6, 3),
    ):
        blocks, table, starts, lens = paged_places(draw, query_lens, [each // group for each in kv_lens], block_size)
        lens = draw.tensor(kv_lens, torch.int32)
        query = draw.normal(sum(query_lens), heads, index_dim)
        cache = draw.normal(blocks, block_size, index_dim)
        yield query, draw.normal(sum(query_lens), heads), cache, table, starts, lens, budget, group
    # Small integers give equal scores, which all backends compute exactly.
    query, cache = (draw.integers(-1, 2, *each.shape).to(draw.dtype) for each in (query, cache))
    weights = draw.integers(-1, 2, *query.shape[:2]).float()
    yield query, weights, cache, table, starts, lens, 6, 1
    yield query, weights * 0, cache, table, starts, lens, 6, 2


@op(
    samples=_select_samples,
    axes={
        "query": "tokens index_heads index_dim",
        "weights": "tokens index_heads",
        "index_cache": _INDEX_CACHE,
        "return": "tokens budget+group-1",
    },
    dtypes={
        "query": FLOATING,
        "weights": ("query", torch.float32),
        "index_cache": "query",
        "return": torch.int32,
    },
    rowwise="tokens",
    state=("index_cache",),
)
def select_keys(
    query: Tensor,
    weights: Tensor,
    index_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    kv_lens: Tensor,
    budget: int,
    group: int = 1,
) -> Tensor:
    """Select the positions that each token attends to, from a paged cache of index keys.

    The score of an index key is ``sum(weights * relu(query @ key))`` over the index heads, in float32. A positive
    factor of all scores changes no choice, so the operation has none. Each token selects the keys with the highest
    scores, among those up to its own position. Of equal scores, the lower position is selected first. A NaN ranks above
    every number, so that attention shows it.

    With a ``group`` of more than 1, an index key stands for so many consecutive tokens, and the cache has one row for
    each complete group. A token selects ``budget / group`` of the groups that are complete at its position, and also
    the tokens of the incomplete group, up to its own.

    A group of 1 is the selection of DeepSeek-V3.2, GLM-5 and HY-V4. Groups with pooled keys are those of GLM-5.3-Flash,
    and, with weights of 1, Qwen3.8-Next. The selection of DeepSeek-V4, whose keys have no positions of tokens, and of
    MiniMax-M3, which differs between key heads, are others.

    Args:
        query: ``[tokens, index_heads, index_dim]``, floating.
        weights: ``[tokens, index_heads]``, of query's dtype or float32.
        index_cache: ``[num_blocks, block_size, index_dim]``, of query's dtype; includes the new keys.
        block_table: ``[sequences, blocks]``, int32, of the index cache; entries past a sequence's length must be valid.
        query_start_loc: ``[sequences + 1]``, int32, ascending from 0.
        kv_lens: ``[sequences]``, int32, in tokens, including the new ones.
        budget: the number of selected tokens, 1 or more, without those of an incomplete group; a multiple of ``group``.
        group: the number of tokens that an index key stands for, 1 or more.

    Returns:
        ``[tokens, budget + group - 1]``, int32: the selected positions in ascending order, then -1. Rows of a sequence
        of length 0, or past the last sequence, have only -1.

    Raises:
        OperationError: the budget or the group is less than 1, or the budget is no multiple of the group.

    Source: DeepSeek-AI, *DeepSeek-V3.2*, 2025.
    """
    check_budget(budget, group)
    block_size = index_cache.shape[1]
    sequence, position = places_of(query.shape[0], query_start_loc, kv_lens)
    keys = index_cache[block_table.long()].flatten(1, 2)[sequence].float()
    scores = (weights.float().unsqueeze(1) @ functional.relu(query.float() @ keys.transpose(1, 2))).squeeze(1)
    complete = ((position + 1) // group)[:, None]
    number = torch.arange(block_table.shape[1] * block_size, device=query.device)
    scores = scores.masked_fill(number >= complete, float("-inf"))
    scores = functional.pad(scores, (0, budget // group), value=float("-inf"))
    chosen = scores.sort(dim=-1, descending=True, stable=True).indices[:, : budget // group]
    within = torch.arange(group, device=query.device)
    members = torch.where((chosen < complete).unsqueeze(-1), chosen.unsqueeze(-1) * group + within, PAST_THE_END)
    rest = complete * group + within[: group - 1]
    rest = torch.where(rest <= position[:, None], rest, PAST_THE_END)
    found = torch.cat((members.flatten(1), rest), -1).to(torch.int32).sort(-1).values
    return torch.where(found == PAST_THE_END, -1, found)


def check_budget(budget: int, group: int) -> None:
    """Raise OperationError unless a selection can have this budget and group."""
    if group < 1:
        raise OperationError(f"select_keys has groups of {group} tokens", "set group to 1 or more")
    if budget < 1:
        raise OperationError(f"select_keys has the budget {budget}, which selects no token", "set budget to 1 or more")
    if budget % group:
        raise OperationError(
            f"select_keys has the budget {budget}, which is no multiple of its groups of {group} tokens",
            f"set budget to a multiple of {group}",
        )


def places_of(tokens: int, query_start_loc: Tensor, kv_lens: Tensor) -> tuple[Tensor, Tensor]:
    """Return each token's sequence and its position there, -1 or less if it is no token of a sequence."""
    token, owner = owners(tokens, query_start_loc)
    starts = query_start_loc.long()
    sequence = owner.clamp(max=kv_lens.shape[0] - 1)
    lengths = kv_lens.long()[sequence]
    position = torch.where((owner == sequence) & (lengths > 0), lengths - starts[sequence + 1] + token, -1)
    return sequence, position


def _attend_samples(draw: Draw) -> Iterator[Sample]:
    for query_lens, kv_lens, heads, rank, rope_dim, block_size, budget in (
        ([1], [1], 4, 32, 16, 16, 4),
        ([5, 17, 1], [5, 17, 1], 2, 64, 32, 16, 7),  # prefill
        ([3, 16], [21, 48], 1, 96, 16, 16, 8),  # prefill after a cached prefix
        ([1, 1, 1], [33, 16, 90], 16, 512, 64, 16, 20),  # decode
        ([1, 1, 1], [20, 0, 0], 3, 72, 24, 8, 24),  # decode with padding rows
    ):
        blocks, table, starts, lens = paged_places(draw, query_lens, kv_lens, block_size)
        _, position = places_of(sum(query_lens), starts.cpu(), lens.cpu())
        positions = torch.full((sum(query_lens), budget), -1, dtype=torch.int32)
        for row, last in zip(positions, position.tolist(), strict=True):
            chosen = draw.permutation(last + 1)[:budget].sort().values
            row[: len(chosen)] = chosen
        query = draw.normal(sum(query_lens), heads, rank + rope_dim)
        cache = draw.normal(blocks, block_size, rank), draw.normal(blocks, block_size, rope_dim)
        scale = (rank + rope_dim) ** -0.5
        yield query[..., :rank], query[..., rank:], *cache, positions.to(draw.device), table, starts, scale


@op(
    samples=_attend_samples,
    axes={
        "query": "tokens num_heads rank",
        "query_rope": "tokens num_heads rope_dim",
        "latent_cache": "num_blocks block_size rank",
        "rope_cache": "num_blocks block_size rope_dim",
        "positions": "tokens selected",
        "return": "tokens num_heads rank",
    },
    dtypes={
        "query": FLOATING,
        "query_rope": "query",
        "latent_cache": "query",
        "rope_cache": "query",
        "positions": torch.int32,
        "return": "query",
    },
    rowwise="tokens",
    state=("latent_cache", "rope_cache"),
)
def attend_selected(
    query: Tensor,
    query_rope: Tensor,
    latent_cache: Tensor,
    rope_cache: Tensor,
    positions: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    scale: float,
) -> Tensor:
    """Attend to selected positions of a paged cache of latents, which all heads share.

    The score of a position is ``(query @ latent + query_rope @ rope) * scale``, and the result the weighted sum of
    latents. Scores and softmax are computed in float32, and the result is rounded once. Only the rows at selected
    positions are read.

    Args:
        query: ``[tokens, num_heads, rank]``, floating: projected to the latent.
        query_rope: ``[tokens, num_heads, rope_dim]``, rotated.
        latent_cache: ``[num_blocks, block_size, rank]``, of query's dtype; includes the new tokens.
        rope_cache: ``[num_blocks, block_size, rope_dim]``, as ``latent_cache``.
        positions: ``[tokens, selected]``, int32: distinct positions in each token's sequence, then -1, as of
            :func:`select_keys`. A row of only -1 returns 0.
        block_table: ``[sequences, blocks]``, int32; entries past a sequence's length must be valid.
        query_start_loc: ``[sequences + 1]``, int32, ascending from 0.
        scale: the factor of the scores.

    Returns:
        ``[tokens, num_heads, rank]``, of query's dtype.

    Source: DeepSeek-AI, *DeepSeek-V3.2*, 2025.
    """
    block_size, (_, owner) = latent_cache.shape[1], owners(query.shape[0], query_start_loc)
    table = block_table.long()[owner.clamp(max=block_table.shape[0] - 1)]
    hidden, at = positions < 0, positions.long().clamp(min=0)
    slots = table.gather(1, at // block_size), at % block_size
    # The row that stands for -1 may contain NaN, and 0 * NaN is NaN.
    latents = latent_cache[slots].float().masked_fill(hidden.unsqueeze(-1), 0.0)
    scores = query.float() @ latents.transpose(1, 2) + query_rope.float() @ rope_cache[slots].float().transpose(1, 2)
    scores = (scores * scale).masked_fill(hidden.unsqueeze(1), float("-inf"))
    weights = scores.softmax(-1).masked_fill(hidden.unsqueeze(1), 0.0)
    return (weights @ latents).to(query.dtype)
