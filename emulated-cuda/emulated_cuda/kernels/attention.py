"""Attention in float32 torch operations, as flash attention and FlashInfer compute it."""

from __future__ import annotations

import torch
from torch import Tensor


def attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool, window: int = -1, cap: float = 0.0
) -> Tensor:
    """Compute attention for one sequence.

    Args:
        query: [tokens, heads, head_dim], the last tokens of the sequence.
        key: [length, kv_heads, head_dim].
        value: as the key.
        scale: the factor of the products.
        causal: whether a token attends only to itself and earlier tokens.
        window: maximum number of earlier tokens that a token attends to; unlimited if negative.
        cap: the bound of the scores; 0 for none.

    Returns:
        [tokens, heads, head_dim], in float32; zeros where the length is 0.
    """
    tokens, length = query.shape[0], key.shape[0]
    if not length:
        return query.new_zeros(query.shape, dtype=torch.float32)
    key, value = (each.float().repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    own, slot = torch.arange(tokens)[:, None] + length - tokens, torch.arange(length)
    seen = torch.ones(tokens, length, dtype=torch.bool)
    if causal:
        seen &= slot <= own
    if window >= 0:
        seen &= slot >= own - window
    scores = torch.einsum("qhd,khd->hqk", query.float(), key) * scale
    if cap > 0:
        scores = cap * torch.tanh(scores / cap)
    # NaN in a query or in the keys it attends to propagates; a token that attends to nothing gets zeros.
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1).masked_fill(~seen, 0)
    if value.isfinite().all():
        return torch.einsum("hqk,khd->qhd", weights, value)
    # Masked values are replaced, because 0 times infinity is NaN.
    rows = [torch.einsum("hk,khd->hd", weights[:, row, seen[row]], value[seen[row]]) for row in range(tokens)]
    return torch.stack(rows)


def pages(cache: Tensor, blocks: Tensor, length: int) -> Tensor:
    """Return the first tokens of a sequence.

    Args:
        cache: [blocks, block_size, kv_heads, head_dim].
        blocks: the sequence's blocks, in order.
        length: the number of tokens.
    """
    return cache[blocks.long()].flatten(0, 1)[:length]
