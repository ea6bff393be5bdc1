"""Attention over packed sequences on the CPU, with torch's attention."""

from __future__ import annotations

from itertools import groupby, pairwise

import torch
from torch import Tensor
from torch.nn import functional


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    query_start_loc_host: Tensor,
    scale: float,
    causal: bool,
) -> Tensor:
    """See :func:`hal.ops.packed_attention`. It runs torch's attention once for each run of equally long sequences."""
    output = torch.zeros_like(query, memory_format=torch.contiguous_format)
    start, grouped = 0, query.shape[1] != key.shape[1]
    for length, run in groupby(end - begin for begin, end in pairwise(query_start_loc_host.tolist())):
        count = len(list(run))
        rows = slice(start, start := start + count * length)
        if not length:
            continue
        queries, keys, values = (
            each[rows].unflatten(0, (count, length)).transpose(1, 2) for each in (query, key, value)
        )
        attended = functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=causal, scale=scale, enable_gqa=grouped
        )
        output[rows] = attended.transpose(1, 2).flatten(0, 1)
    return output
