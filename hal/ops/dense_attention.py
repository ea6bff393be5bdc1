"""Attention over keys and values in plain tensors, as engines without a paged cache pass them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hal.ops.declaration.dtypes import FLOATING
from hal.ops.declaration.operation import op
from hal.ops.declaration.samples import Draw, Sample


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
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        sink = sinks.float().view(1, key.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    weights = weights.masked_fill(~visible, 0.0)
    attended: Tensor = (weights @ value.float().unsqueeze(2)).flatten(1, 2)
    return attended.to(query.dtype)
