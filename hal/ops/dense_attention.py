"""Attention without a cache: over padded and over packed sequences, as encoders compute it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hal.ops.attention import owners, weights_of
from hal.ops.declaration.constraints import Draw, Sample
from hal.ops.declaration.dtypes import FLOATING
from hal.ops.declaration.operation import op


def _samples(draw: Draw) -> Iterator[Sample]:
    for batch, heads, kv_heads, queries, keys, head_dim, causal in (
        (1, 4, 2, 5, 5, 64, True),
        (2, 4, 4, 1, 9, 32, False),
        (3, 2, 1, 4, 7, 128, True),
        (2, 8, 2, 1, 6, 64, True),
    ):
        tensors = (
            draw.normal(batch, heads, queries, head_dim),
            *(draw.normal(batch, kv_heads, keys, head_dim) for _ in range(2)),
        )
        mask = draw.integers(0, 2, batch, 1, queries, keys).bool()
        mask[..., 0] = True
        yield *tensors, None, head_dim**-0.5, causal, None, None
        yield *tensors, mask, 0.3, False, None, None
    empty = torch.zeros_like(mask)
    yield *tensors, empty, 0.5, False, None, None  # queries that attend to no key
    for heads, kv_heads, softcap, with_sinks in ((2, 1, 2.0, True), (4, 4, None, True), (6, 2, 30.0, False)):
        query, sinks = draw.normal(3, heads, 4, 128), draw.normal(heads) if with_sinks else None
        key, value = (draw.normal(3, kv_heads, 7, 128) for _ in range(2))
        yield query, key, value, None, 0.3, True, softcap, sinks
    turned = [draw.normal(2, size, heads, 32).transpose(1, 2) for size, heads in ((3, 4), (8, 2), (8, 2))]
    yield *turned, None, 0.2, True, None, None
    none = (draw.normal(0, size, length, 64) for size, length in ((4, 1), (2, 5), (2, 5)))
    yield *none, None, 0.125, False, None, None


@op(
    samples=_samples,
    axes={
        "query": "batch num_heads queries head_dim",
        "key": "batch num_kv_heads keys head_dim",
        "value": "batch num_kv_heads keys head_dim",
        "mask": "batch 1 queries keys",
        "sinks": "num_heads",
        "return": "batch num_heads queries head_dim",
    },
    dtypes={
        "query": FLOATING,
        "key": "query",
        "value": "query",
        "mask": torch.bool,
        "sinks": "query",
        "return": "query",
    },
    rowwise=None,  # Rows are independent, but torch's kernel for the CPU does not keep a NaN.
)
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend to keys and values that are plain tensors. hal's own models use :func:`paged_attention`.

    Query heads share key heads in groups of ``num_heads / num_kv_heads``. Scores and softmax are computed in float32,
    and the result is rounded once. A query that attends to no key returns 0.

    Args:
        query: ``[batch, num_heads, queries, head_dim]``, floating.
        key: ``[batch, num_kv_heads, keys, head_dim]``, of query's dtype.
        value: as ``key``.
        mask: ``[batch, 1, queries, keys]``, bool, True where a query attends to a key; None for all.
        scale: factor of the scores.
        causal: whether a query attends only to keys up to its own. The queries are the last of the keys' tokens.
        softcap: the bound of the scores, as in :class:`hal.ops.AttentionOptions`; None for none.
        sinks: ``[num_heads]``, of query's dtype, as in :func:`paged_attention`; None for none.

    Returns:
        ``[batch, num_heads, queries, head_dim]``, of query's dtype.

    Source: Vaswani et al., *Attention Is All You Need*, 2017; Ainslie et al., *GQA*, 2023.
    """
    queries, keys = query.shape[2], key.shape[2]
    grouped = query.float().unflatten(1, (key.shape[1], -1))
    scores = grouped @ key.float().transpose(-1, -2).unsqueeze(2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    visible = torch.ones(queries, keys, dtype=torch.bool, device=query.device)
    if causal:
        visible = visible.tril(keys - queries)
    if mask is not None:
        visible = visible & mask.unsqueeze(2)
    attended: Tensor = (weights_of(scores, visible, sinks) @ value.float().unsqueeze(2)).flatten(1, 2)
    return attended.to(query.dtype)


def _packed_samples(draw: Draw) -> Iterator[Sample]:
    for lengths, heads, kv_heads, head_dim, causal, padding in (
        ((5,), 4, 4, 64, False, 0),
        ((16, 16, 16), 2, 2, 72, False, 0),  # equal lengths, and a head that is no multiple of 16
        ((3, 12, 1), 4, 2, 80, False, 0),
        ((7, 4), 4, 1, 128, True, 0),
        ((4, 0, 9), 2, 2, 32, False, 0),  # an empty sequence
        ((6, 2, 0), 3, 3, 24, True, 5),  # rows of padding
    ):
        tokens = sum(lengths) + padding
        starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        yield (
            draw.normal(tokens, heads, head_dim),
            *(draw.normal(tokens, kv_heads, head_dim) for _ in range(2)),
            starts.to(draw.device),
            starts,
            head_dim**-0.5,
            causal,
        )
    merged = draw.normal(10, 3 * 64)  # views into a merged projection
    starts = torch.tensor([0, 4, 10], dtype=torch.int32)
    query, key, value = (each.view(10, 2, 32) for each in merged.split(64, dim=-1))
    yield query, key, value, starts.to(draw.device), starts, 0.3, False


@op(
    samples=_packed_samples,
    axes={
        "query": "tokens num_heads head_dim",
        "key": "tokens num_kv_heads head_dim",
        "value": "tokens num_kv_heads head_dim",
        "query_start_loc": "starts",
        "query_start_loc_host": "starts",
        "return": "tokens num_heads head_dim",
    },
    dtypes={
        "query": FLOATING,
        "key": "query",
        "value": "query",
        "return": "query",
    },
    rowwise=None,  # A row depends on all rows of its sequence.
    host=("query_start_loc_host",),
)
def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    query_start_loc_host: Tensor,
    scale: float,
    causal: bool,
) -> Tensor:
    """Attend within each of several sequences, whose tokens follow each other. There is no cache.

    Sequence ``i`` has the rows from ``query_start_loc[i]`` to ``query_start_loc[i + 1]``. Query heads share key heads
    in groups of ``num_heads / num_kv_heads``. Scores and softmax are computed in float32, and the result is rounded
    once. Rows past the last sequence return 0, and no query reads them.

    Args:
        query: ``[tokens, num_heads, head_dim]``, floating.
        key: ``[tokens, num_kv_heads, head_dim]``, of query's dtype.
        value: as ``key``.
        query_start_loc: ``[sequences + 1]``, int32, ascending from 0. A sequence may be empty.
        query_start_loc_host: a CPU copy of ``query_start_loc``.
        scale: factor of the scores.
        causal: whether a query attends only to tokens up to its own.

    Returns:
        ``[tokens, num_heads, head_dim]``, of query's dtype.

    Source: Vaswani et al., *Attention Is All You Need*, 2017; Dao, *FlashAttention-2*, 2023, for the packed form.
    """
    tokens, kv_heads = query.shape[0], key.shape[1]
    token, owner = owners(tokens, query_start_loc)
    outside = token >= query_start_loc[-1]
    visible = (owner[:, None] == owner) & ~outside
    if causal:
        visible = visible & (token <= token[:, None])
    grouped = query.float().unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
    keys, values = (each.float().masked_fill(outside[:, None, None], 0.0).transpose(0, 1) for each in (key, value))
    scores = grouped @ keys.transpose(1, 2).unsqueeze(1) * scale
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1).masked_fill(~visible | outside[:, None], 0.0)
    attended: Tensor = (weights @ values.unsqueeze(1)).permute(2, 0, 1, 3).reshape(query.shape)
    return attended.to(query.dtype)
