"""Attention to a window of a paged cache, and to entries of another cache that each stand for several tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hal.errors import OperationError
from hal.ops.declaration.constraints import Draw, Sample
from hal.ops.declaration.dtypes import FLOATING
from hal.ops.declaration.operation import op
from hal.ops.selection import paged_places, places_of


def _samples(draw: Draw) -> Iterator[Sample]:
    for query_lens, kv_lens, heads, head_dim, block_size, group, window, selected in (
        ([1], [1], 4, 32, 16, 4, 5, 3),
        ([5, 17, 1], [5, 17, 1], 2, 48, 16, 4, 7, 2),  # prefill
        ([3, 16], [21, 48], 1, 96, 16, 4, 8, 6),  # prefill after a cached prefix
        ([1, 1, 1], [33, 16, 90], 16, 512, 16, 8, 20, 4),  # decode
        ([1, 1, 1], [20, 0, 0], 3, 72, 8, 2, 100, 12),  # decode with padding rows, and a window for all
        ([9, 2], [19, 70], 8, 128, 32, 16, 6, None),  # all entries
        ([1, 1, 1], [3, 0, 64], 4, 64, 32, 32, 1, None),
    ):
        blocks, table, starts, lens = paged_places(draw, query_lens, kv_lens, block_size)
        tokens, entries = sum(query_lens), None
        if selected is not None:
            _, position = places_of(tokens, starts.cpu(), lens.cpu())
            entries = torch.full((tokens, selected), -1, dtype=torch.int32)
            for row, last in zip(entries, position.tolist(), strict=True):
                chosen = draw.permutation((last + 1) // group)[:selected].sort().values
                row[: len(chosen)] = chosen
            entries = entries.to(draw.device)
        caches = (draw.normal(blocks, size, head_dim) for size in (block_size, block_size // group))
        query, sinks = draw.normal(tokens, heads, head_dim), draw.normal(heads)
        yield query, *caches, entries, sinks, table, starts, lens, group, window, head_dim**-0.5


@op(
    samples=_samples,
    axes={
        "query": "tokens num_heads head_dim",
        "latent_cache": "num_blocks block_size head_dim",
        "entry_cache": "num_blocks entries_per_block head_dim",
        "entries": "tokens selected",
        "sinks": "num_heads",
        "return": "tokens num_heads head_dim",
    },
    dtypes={
        "query": FLOATING,
        **dict.fromkeys(("latent_cache", "entry_cache", "sinks", "return"), "query"),
        "entries": torch.int32,
    },
    rowwise="tokens",
    state=("latent_cache", "entry_cache"),
    rare=True,
)
def attend_compressed(
    query: Tensor,
    latent_cache: Tensor,
    entry_cache: Tensor,
    entries: Tensor | None,
    sinks: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    kv_lens: Tensor,
    group: int,
    window: int,
    scale: float,
) -> Tensor:
    """Attend to the last tokens of a sequence, and to entries that each stand for a group of its tokens.

    All heads share the rows of both caches, which are keys and values. A token attends to the ``window`` tokens that
    end with its own, and beside them to the given entries, or to those of all groups that are complete at its position.
    The score of a row is ``query @ row * scale``. The softmax over all scores has one score more for each head, its
    sink, which has no value. Computed in float32, and rounded once. Only the rows that a token attends to are read.

    Args:
        query: ``[tokens, num_heads, head_dim]``, floating.
        latent_cache: ``[num_blocks, block_size, head_dim]``, of query's dtype: a row for each token, including the new
            ones.
        entry_cache: ``[num_blocks, block_size // group, head_dim]``, as ``latent_cache``: a row for each group.
        entries: ``[tokens, selected]``, int32: distinct entries of each token's sequence, then -1; None for those of
            all complete groups.
        sinks: ``[num_heads]``, of query's dtype.
        block_table: ``[sequences, blocks]``, int32, of both caches; entries past a sequence's length must be valid.
        query_start_loc: ``[sequences + 1]``, int32, ascending from 0.
        kv_lens: ``[sequences]``, int32, in tokens, including the new ones.
        group: the number of tokens of a group, 1 or more; it divides ``block_size``.
        window: the number of tokens, 1 or more.
        scale: the factor of the scores.

    Returns:
        ``[tokens, num_heads, head_dim]``, of query's dtype; 0 for tokens of no sequence.

    Raises:
        OperationError: the window has no token, or the entries of a block are not those of its groups.

    Source: DeepSeek-AI, *DeepSeek-V4*, 2026.
    """
    check_window(window, group, latent_cache, entry_cache)
    sequence, position = places_of(query.shape[0], query_start_loc, kv_lens)
    table, last = block_table.long()[sequence], position[:, None]
    near = last + torch.arange(1 - window, 1, device=query.device)
    if entries is None:
        number = torch.arange(table.shape[1] * entry_cache.shape[1], device=query.device)
        entries = torch.where(number < (last + 1) // group, number, -1)
    places = torch.cat((near, entries), 1)
    hidden, sink = (places < 0).unsqueeze(1), sinks.float()[:, None].expand(*query.shape[:2], 1)
    read = [_rows(cache, at, table) for cache, at in ((latent_cache, near), (entry_cache, entries.long()))]
    # The row that stands for a hidden one may contain NaN, and 0 * NaN is NaN.
    rows = torch.cat(read, 1).float().masked_fill(hidden.transpose(1, 2), 0.0)
    scores = (query.float() @ rows.transpose(1, 2) * scale).masked_fill(hidden, float("-inf"))
    weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    return (weights @ rows).to(query.dtype)


def check_window(window: int, group: int, latent_cache: Tensor, entry_cache: Tensor) -> None:
    """Raise OperationError unless there is a window, and a block has an entry for each of its groups."""
    if window < 1 or latent_cache.shape[1] != group * entry_cache.shape[1]:
        raise OperationError(
            f"attend_compressed has a window of {window} tokens, blocks of {latent_cache.shape[1]}, and "
            f"{entry_cache.shape[1]} entries in each for groups of {group}",
            "set window to 1 or more, and group to the tokens of a block divided by its entries",
        )


def _rows(cache: Tensor, at: Tensor, table: Tensor) -> Tensor:
    """Return rows of a paged cache, ``[tokens, count, width]``, by their numbers; any valid row for a negative one."""
    at = at.clamp(min=0)
    return cache[table.gather(1, at // cache.shape[1]), at % cache.shape[1]]
