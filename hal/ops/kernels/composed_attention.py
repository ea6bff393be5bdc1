"""Attention in torch's operations: over the paged cache, with all options, for drivers whose kernels lack some of them.

:func:`widening` attends over a quantized cache, and :func:`joining` over a latent one. :func:`decode` and
:func:`one_by_one` gather keys and values from the cache. :func:`decode` reads lengths on the device only, so a captured
graph serves all lengths. :func:`packed` attends without a cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import groupby, pairwise

import torch
from torch import Tensor
from torch.nn import functional

from hal.ops.attention import AttentionOptions, alibi_slopes
from hal.ops.cache import widened_heads
from hal.ops.kernels.kernel_table import Kernel


def decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    kv_lens: Tensor,
    sinks: Tensor | None,
    options: AttentionOptions,
) -> Tensor:
    """Attend with one query per sequence over all slots of its blocks, with a mask.

    The query heads that share a key head become rows of one product, so that keys are not repeated. The arguments are
    those of :func:`hal.ops.paged_attention`.
    """
    sequences, heads, head_dim = query.shape
    kv_heads, blocks = key_cache.shape[2], block_table.long()
    keys, values = (cache[blocks].flatten(1, 2) for cache in (key_cache, value_cache))
    slot, lengths = torch.arange(keys.shape[1], device=query.device), kv_lens[:, None]
    hidden = slot >= lengths
    if options.window is not None:
        hidden |= slot < lengths - options.window
    if options.chunk is not None:
        hidden |= slot // options.chunk != (lengths - 1) // options.chunk
    biases = None
    if options.alibi is not None:
        slopes = alibi_slopes(heads, query.device).view(1, kv_heads, -1, 1)
        biases = options.alibi * slopes * (slot - lengths + 1)[:, None, None, :]
    # Unwritten slots may hold NaN, which a weight of 0 does not remove.
    values.masked_fill_(hidden[:, :, None, None], 0.0)
    rows = query.reshape(sequences, kv_heads, heads // kv_heads, head_dim)
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    return _attend(rows, keys, values, hidden[:, None, None, :], biases, sinks, options).reshape(query.shape)


def one_by_one(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    starts: list[int],
    lengths: list[int],
    sinks: Tensor | None,
    options: AttentionOptions,
) -> Tensor:
    """Attend with any number of queries per sequence, in one call for each sequence.

    Args:
        query: as of :func:`hal.ops.paged_attention`, like the arguments that are not described here.
        starts: ``query_start_loc_host`` as a list.
        lengths: ``kv_lens_host`` as a list.
    """
    output = torch.zeros_like(query, memory_format=torch.contiguous_format)
    kv_heads = key_cache.shape[2]
    for row, length in enumerate(lengths):
        start, end = starts[row], starts[row + 1]
        if length == 0 or start == end:
            continue
        blocks = block_table[row, : math.ceil(length / key_cache.shape[1])].long()
        keys, values = (cache[blocks].flatten(0, 1)[:length].transpose(0, 1) for cache in (key_cache, value_cache))
        at = torch.arange(length - (end - start), length, device=query.device)[:, None]
        slot = torch.arange(length, device=query.device)
        mask = slot <= at if options.causal else torch.ones(1, length, dtype=torch.bool, device=query.device)
        if options.window is not None:
            mask = mask & (slot > at - options.window) & (slot < at + options.window)
        if options.chunk is not None:
            mask = mask & (slot // options.chunk == at // options.chunk)
        # Heads that share a key head become rows of one product: [kv_heads, heads of a key head * queries, head_dim].
        rows = query[start:end].transpose(0, 1).reshape(1, kv_heads, -1, query.shape[2])
        seen = mask.expand(end - start, length).repeat(query.shape[1] // kv_heads, 1)[None, None]
        biases = None
        if options.alibi is not None:
            slopes = options.alibi * alibi_slopes(query.shape[1], query.device)
            biases = (slopes[:, None, None] * (slot - at)).view(1, kv_heads, -1, length)
        if sinks is None and biases is None and options.softcap is None:
            attended = functional.scaled_dot_product_attention(
                rows, keys[None], values[None], attn_mask=seen, scale=options.scale
            )
        else:
            attended = _attend(rows, keys[None], values[None], seen.logical_not(), biases, sinks, options)
        # Some of torch's kernels return results that are not contiguous.
        output[start:end] = attended.reshape(query.shape[1], end - start, -1).transpose(0, 1)
    return output


def _attend(
    rows: Tensor,
    keys: Tensor,
    values: Tensor,
    hidden: Tensor,
    biases: Tensor | None,
    sinks: Tensor | None,
    options: AttentionOptions,
) -> Tensor:
    """Attend with the rows ``[batch, kv_heads, rows, head_dim]``: heads of a key head, each with all its queries.

    Rows from which all keys are hidden return 0. On NPUs each line is one launch or few, which decide the speed.
    """
    batch, kv_heads, count, _ = rows.shape
    product = rows.float() @ keys.float().transpose(-1, -2)
    if options.softcap is None:
        scores = product * options.scale
    else:
        scores = options.softcap * torch.tanh(product * (options.scale / options.softcap))
    if biases is not None:
        scores += biases
    scores.masked_fill_(hidden, float("-inf"))
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        by_head = sinks.float().view(1, kv_heads, -1, 1, 1)
        sink = by_head.expand(batch, -1, -1, count * kv_heads // sinks.shape[0], 1).reshape(batch, kv_heads, count, 1)
        weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    return (weights.masked_fill_(hidden, 0.0) @ values.float()).to(rows.dtype)


Widen = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Takes keys, values, their scales, and the numbers of blocks. Returns the keys and values of these blocks."""


def widened_blocks(
    keys: Tensor, values: Tensor, key_scales: Tensor, value_scales: Tensor, blocks: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the keys and values of blocks in float32; see :data:`Widen`."""
    return widened_heads(keys[blocks], key_scales[blocks]), widened_heads(values[blocks], value_scales[blocks])


def widening(attention: Kernel, widen: Widen = widened_blocks) -> Kernel:
    """Return a kernel of :func:`hal.ops.quantized_paged_attention` that widens the blocks of its sequences.

    A graph can capture a decode if it can capture that of ``attention``.

    Args:
        attention: the kernel of :func:`hal.ops.paged_attention`.
        widen: widens blocks.
    """

    def quantized_paged_attention(
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        key_scales: Tensor,
        value_scales: Tensor,
        block_table: Tensor,
        query_start_loc: Tensor,
        kv_lens: Tensor,
        query_start_loc_host: Tensor,
        kv_lens_host: Tensor,
        sinks: Tensor | None,
        options: AttentionOptions,
    ) -> Tensor:
        blocks = block_table.flatten()
        own = torch.arange(blocks.shape[0], dtype=torch.int32, device=query.device).view(block_table.shape)
        wide = (each.to(query.dtype) for each in widen(keys, values, key_scales, value_scales, blocks))
        return attention(  # type: ignore[no-any-return]
            query, *wide, own, query_start_loc, kv_lens, query_start_loc_host, kv_lens_host, sinks, options
        )

    return quantized_paged_attention


def joining(attention: Kernel) -> Kernel:
    """Return a kernel of :func:`hal.ops.latent_attention` that joins both rows of its sequences' tokens.

    A graph can capture a decode if it can capture that of ``attention``.

    Args:
        attention: the kernel of :func:`hal.ops.paged_attention`, for one key head.
    """

    def latent_attention(
        query: Tensor,
        query_rope: Tensor,
        latent_cache: Tensor,
        rope_cache: Tensor,
        block_table: Tensor,
        query_start_loc: Tensor,
        kv_lens: Tensor,
        query_start_loc_host: Tensor,
        kv_lens_host: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        blocks = block_table.flatten()
        own = torch.arange(blocks.shape[0], dtype=torch.int32, device=query.device).view(block_table.shape)
        keys = torch.cat([each.index_select(0, blocks) for each in (latent_cache, rope_cache)], -1).unsqueeze(2)
        heads, lengths = torch.cat((query, query_rope), -1), (query_start_loc, kv_lens)
        on_host = query_start_loc_host, kv_lens_host
        attended: Tensor = attention(heads, keys, keys, own, *lengths, *on_host, None, options)
        return attended[..., : query.shape[-1]].contiguous()

    return latent_attention


def packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    query_start_loc_host: Tensor,
    scale: float,
    causal: bool,
) -> Tensor:
    """Attend within packed sequences, with one call of torch's attention for each run of equally long ones.

    The arguments are those of :func:`hal.ops.packed_attention`.
    """
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
