"""The fusion of a selection with the attention that reads it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hal.ops.declaration.constraints import Draw, Sample
from hal.ops.declaration.dtypes import FLOATING
from hal.ops.declaration.operation import fused_op
from hal.ops.selection import attend_selected, select_keys


def _samples(draw: Draw) -> Iterator[Sample]:
    for tokens, kv_lens, heads, rank, rope_dim, index_heads, index_dim, budget, block_size, widest, group in (
        ((1, 1, 1), (40, 0, 90), 16, 512, 64, 8, 128, 20, 16, 6, 1),  # decode, with a padding row
        ((5, 1), (21, 33), 2, 32, 16, 3, 64, 7, 8, 5, 1),  # prefill after a cached prefix
        ((5, 1), (21, 33), 2, 32, 16, 3, 64, 8, 8, 5, 4),
    ):
        count = sum(tokens)
        table = draw.permutation(widest * len(tokens)).view(len(tokens), widest)
        starts = torch.tensor([0, *tokens]).cumsum(0).to(torch.int32).to(draw.device)
        index_cache = draw.normal(table.numel(), block_size // group, index_dim)
        latent_cache, rope_cache = (draw.normal(table.numel(), block_size, size) for size in (rank, rope_dim))
        query = draw.normal(count, heads, rank), draw.normal(count, heads, rope_dim)
        index = draw.normal(count, index_heads, index_dim), draw.normal(count, index_heads), index_cache
        lengths = table, starts, draw.tensor(kv_lens, torch.int32)
        yield *index, *query, latent_cache, rope_cache, *lengths, budget, (rank + rope_dim) ** -0.5, group


@fused_op(
    samples=_samples,
    axes={
        "index_query": "tokens index_heads index_dim",
        "weights": "tokens index_heads",
        "index_cache": "num_blocks groups index_dim",
        "query": "tokens num_heads rank",
        "query_rope": "tokens num_heads rope_dim",
        "latent_cache": "num_blocks block_size rank",
        "rope_cache": "num_blocks block_size rope_dim",
        "return": "tokens num_heads rank",
    },
    dtypes={
        "index_query": FLOATING,
        "weights": ("index_query", torch.float32),
        "index_cache": "index_query",
        "query": "index_query",
        "query_rope": "index_query",
        "latent_cache": "index_query",
        "rope_cache": "index_query",
        "return": "index_query",
    },
    rowwise="tokens",
    state=("index_cache", "latent_cache", "rope_cache"),
)
def select_and_attend(
    index_query: Tensor,
    weights: Tensor,
    index_cache: Tensor,
    query: Tensor,
    query_rope: Tensor,
    latent_cache: Tensor,
    rope_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    kv_lens: Tensor,
    budget: int,
    scale: float,
    group: int = 1,
) -> Tensor:
    """Apply :func:`select_keys`, then :func:`attend_selected` to the selected positions, which nothing else reads.

    Args:
        index_query: the query of :func:`select_keys`, ``[tokens, index_heads, index_dim]``, floating.
        weights, index_cache: see there.
        query: ``[tokens, num_heads, rank]``, of index_query's dtype; see :func:`attend_selected`.
        query_rope, latent_cache, rope_cache: see there, like ``scale``.
        block_table: ``[sequences, blocks]``, int32, of all three caches.
        query_start_loc: ``[sequences + 1]``, int32.
        kv_lens: ``[sequences]``, int32.
        budget: the number of selected tokens, 1 or more.
        scale: the factor of the scores.
        group: the number of tokens that an index key stands for; see :func:`select_keys`.

    Returns:
        ``[tokens, num_heads, rank]``, of query's dtype.
    """
    positions = select_keys(index_query, weights, index_cache, block_table, query_start_loc, kv_lens, budget, group)
    return attend_selected(query, query_rope, latent_cache, rope_cache, positions, block_table, query_start_loc, scale)
