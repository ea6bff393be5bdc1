"""Sparse attention with a choice for each key head: an index selects blocks of tokens, and an attention reads them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from hal.errors import OperationError
from hal.ops.attention import owners
from hal.ops.declaration.constraints import Draw, Sample
from hal.ops.declaration.dtypes import FLOATING
from hal.ops.declaration.operation import op
from hal.ops.selection import PAST_THE_END, paged_places, places_of

_SHAPES = (
    ([1], [1], 16),
    ([5, 17, 1], [5, 17, 1], 16),  # prefill
    ([3, 16], [21, 48], 16),  # prefill after a cached prefix
    ([1, 1, 1], [33, 16, 90], 16),  # decode
    ([1, 1, 1], [20, 0, 0], 8),  # decode with padding rows
)


def _select_samples(draw: Draw) -> Iterator[Sample]:
    options = ((2, 4, 1), (1, 3, 0), (2, 8, 2), (3, 4, 1), (8, 12, 1))
    for (query_lens, kv_lens, block_size), (top, group, local), heads in zip(
        _SHAPES, options, (1, 4, 2, 3, 2), strict=True
    ):
        blocks, table, starts, lens = paged_places(draw, query_lens, kv_lens, block_size)
        query, cache = draw.normal(sum(query_lens), heads, 16 * top), draw.normal(blocks, block_size, 16 * top)
        yield query, cache, table, starts, lens, top, group, local
    # Small integers give equal scores, which all backends compute exactly.
    query, cache = (draw.integers(-1, 2, *each.shape).to(draw.dtype) for each in (query, cache))
    yield query, cache, table, starts, lens, 3, 2, 1


@op(
    samples=_select_samples,
    axes={
        "query": "tokens index_heads index_dim",
        "index_cache": "num_blocks block_size index_dim",
        "return": "tokens index_heads top*group",
    },
    dtypes={
        "query": FLOATING,
        "index_cache": "query",
        "return": torch.int32,
    },
    rowwise="tokens",
    state=("index_cache",),
)
def select_blocks(
    query: Tensor,
    index_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    kv_lens: Tensor,
    top: int,
    group: int,
    local: int,
) -> Tensor:
    """Select the blocks of positions that each token attends to with each index head, from a cache of index keys.

    Blocks are of ``group`` consecutive positions. The score of a block is the largest ``query @ key`` of its positions
    up to the token's own, in float32. A token selects its own block and the ``local - 1`` before it, and of the others
    those with the highest scores, ``top`` in all. Of equal scores, the lower block is selected first. A NaN ranks above
    every number, so that attention shows it.

    Args:
        query: ``[tokens, index_heads, index_dim]``, floating.
        index_cache: ``[num_blocks, block_size, index_dim]``, of query's dtype; includes the new keys.
        block_table: as of :func:`select_keys`, like the arguments that follow.
        query_start_loc, kv_lens: see there.
        top: the number of selected blocks, 1 or more.
        group: the number of positions of a block, 1 or more.
        local: the number of last blocks that are selected in any case, from 0 to ``top``.

    Returns:
        ``[tokens, index_heads, top * group]``, int32: the positions of the selected blocks up to the token's own, in
        ascending order, then -1. Rows of a sequence of length 0, or past the last sequence, have only -1.

    Raises:
        OperationError: a number is out of range.

    Source: MiniMax, the published code of MiniMax-M3, 2026.
    """
    check_blocks(top, group, local)
    sequence, position = places_of(query.shape[0], query_start_loc, kv_lens)
    keys = index_cache[block_table.long()].flatten(1, 2)[sequence].float()
    number, last = torch.arange(keys.shape[1], device=query.device), position[:, None, None]
    scores = (query.float() @ keys.transpose(1, 2)).masked_fill(number > last, float("-inf"))
    # Whole blocks, and as many as are selected at least.
    scores = functional.pad(scores, (0, -number.shape[0] % group + top * group), value=float("-inf"))
    scores = scores.unflatten(-1, (-1, group)).amax(-1)
    block, own = torch.arange(scores.shape[-1], device=query.device), last // group
    scores = scores.masked_fill((block > own - local) & (block <= own), float("inf"))
    chosen = scores.sort(dim=-1, descending=True, stable=True).indices[..., :top]
    found = chosen.unsqueeze(-1) * group + torch.arange(group, device=query.device)
    found = torch.where(found <= last.unsqueeze(-1), found, PAST_THE_END).flatten(2).to(torch.int32).sort(-1).values
    return torch.where(found == PAST_THE_END, -1, found)


def check_blocks(top: int, group: int, local: int) -> None:
    """Raise OperationError unless a selection can have these numbers of blocks, positions of each, and last ones."""
    if top < 1 or group < 1 or not 0 <= local <= top:
        raise OperationError(
            f"select_blocks selects {top} blocks of {group} positions, with the last {local}",
            "set top and group to 1 or more, and local to a number from 0 to top",
        )


def _attend_samples(draw: Draw) -> Iterator[Sample]:
    for (query_lens, kv_lens, block_size), (heads, kv_heads, choices, selected) in zip(
        _SHAPES, ((4, 2, 2, 4), (6, 3, 1, 7), (2, 1, 1, 8), (8, 4, 2, 20), (3, 3, 3, 24)), strict=True
    ):
        blocks, table, starts, lens = paged_places(draw, query_lens, kv_lens, block_size)
        _, position = places_of(sum(query_lens), starts.cpu(), lens.cpu())
        positions = torch.full((sum(query_lens), choices, selected), -1, dtype=torch.int32)
        for rows, last in zip(positions, position.tolist(), strict=True):
            for row in rows:
                chosen = draw.permutation(last + 1)[:selected].sort().values
                row[: len(chosen)] = chosen
        query = draw.normal(sum(query_lens), heads, 8 * heads)
        caches = (draw.normal(blocks, block_size, kv_heads, 8 * heads) for _ in range(2))
        yield query, *caches, positions.to(draw.device), table, starts, 0.2


@op(
    samples=_attend_samples,
    axes={
        "query": "tokens num_heads head_dim",
        "key_cache": "num_blocks block_size num_kv_heads head_dim",
        "value_cache": "num_blocks block_size num_kv_heads head_dim",
        "positions": "tokens choices selected",
        "return": "tokens num_heads head_dim",
    },
    dtypes={
        "query": FLOATING,
        "key_cache": "query",
        "value_cache": "query",
        "positions": torch.int32,
        "return": "query",
    },
    rowwise="tokens",
    state=("key_cache", "value_cache"),
    rare=True,
)
def attend_chosen(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    scale: float,
) -> Tensor:
    """Attend to chosen positions of a paged cache of keys and values, with a choice for each of several key heads.

    Scores and softmax are computed in float32, and the result is rounded once. Only the rows at chosen positions are
    read.

    Args:
        query: ``[tokens, num_heads, head_dim]``, floating.
        key_cache: as of :func:`paged_attention`; includes the new tokens.
        value_cache: see there.
        positions: ``[tokens, choices, selected]``, int32: for equal groups of consecutive key heads, distinct positions
            in each token's sequence, then -1, as of :func:`select_blocks`. A row of only -1 returns 0.
        block_table: ``[sequences, blocks]``, int32; entries past a sequence's length must be valid.
        query_start_loc: ``[sequences + 1]``, int32, ascending from 0.
        scale: the factor of the scores.

    Returns:
        ``[tokens, num_heads, head_dim]``, of query's dtype.

    Raises:
        OperationError: the choices do not divide the key heads, or these the heads.

    Source: MiniMax, the published code of MiniMax-M3, 2026.
    """
    kv_heads, choices, block_size = key_cache.shape[2], positions.shape[1], key_cache.shape[1]
    check_choices(choices, kv_heads, query.shape[1])
    _, owner = owners(query.shape[0], query_start_loc)
    table = block_table.long()[owner.clamp(max=block_table.shape[0] - 1)]
    chosen = positions.long().repeat_interleave(kv_heads // choices, 1)  # [tokens, num_kv_heads, selected]
    hidden, at = chosen < 0, chosen.clamp(min=0)
    head = torch.arange(kv_heads, device=query.device)[:, None]
    slots = table.gather(1, (at // block_size).flatten(1)).view_as(at), at % block_size, head
    # The row that stands for -1 may contain NaN, and 0 * NaN is NaN.
    keys, values = (each[slots].float().masked_fill(hidden.unsqueeze(-1), 0.0) for each in (key_cache, value_cache))
    scores = query.float().unflatten(1, (kv_heads, -1)) @ keys.transpose(2, 3) * scale
    weights = scores.masked_fill(hidden.unsqueeze(2), float("-inf")).softmax(-1).masked_fill(hidden.unsqueeze(2), 0.0)
    result: Tensor = weights @ values
    return result.flatten(1, 2).to(query.dtype)


def check_choices(choices: int, kv_heads: int, heads: int) -> None:
    """Raise OperationError unless the choices divide the key heads, and these the heads."""
    if kv_heads % choices or heads % kv_heads:
        raise OperationError(
            f"attend_chosen has {choices} choices for {kv_heads} key heads and {heads} heads",
            "use numbers of which each divides the next",
        )
