"""Attention over the paged cache, for decode and prefill alike.

A program processes some queries of one sequence, for the query heads that share a key head, so that the keys are read
once for all of them. Programs read the sequence and its length on the device, and grids depend only on shapes, so a
captured launch serves all lengths. If the programs would not fill the device, each sequence's keys are split among
several programs, and a second kernel combines their parts.

Sources: Dao, *FlashAttention-2*, 2023; Dao et al., *Flash-Decoding for long-context inference*, 2023.
"""

from __future__ import annotations

import math
from functools import cache

import attrs
import torch
import triton
import triton.language as tl
from torch import Tensor

from hal.ops import AttentionOptions

from .arguments import INTEGERS, require, unit_stride
from .interpreter import bound, dot, rounded
from .tiles import owner

LOG2_E = tl.constexpr(math.log2(math.e))
MAX_SPLITS = 64
MIN_SPLIT_KEYS = 256
"""Minimum number of keys in a split, for a sequence that fills its blocks."""


@triton.jit
def _slope(head, num_heads: tl.constexpr, whole: tl.constexpr):
    """Return the slope of ALiBi of a head; see :func:`hal.ops.attention.alibi_slopes`."""
    power = head + 1
    if whole != num_heads:
        power = tl.where(head < whole // 2, 2 * head + 2, 2 * head + 1 - whole)
    return tl.exp2(power * (-8.0 / whole))


@triton.jit(do_not_specialize=["tokens", "sequences", "splits", "table_sequence"])
def _attend(
    query,
    key_cache,
    value_cache,
    block_table,
    query_start_loc,
    kv_lens,
    result,
    sums,
    bests,
    totals,
    tokens,
    sequences,
    splits,
    query_token,
    query_head,
    table_sequence,
    sinks,
    scale,
    softcap,
    window,
    chunk,
    alibi,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    block_size: tl.constexpr,
    causal: tl.constexpr,
    slopes: tl.constexpr,
    queries: tl.constexpr,
    rows: tl.constexpr,
    keys: tl.constexpr,
    width: tl.constexpr,
):
    """Write ``result``; or if ``sums`` is given, a part: weighted sums of values, the largest score, the weights."""
    group: tl.constexpr = num_heads // num_kv_heads
    block, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = owner(block, query_start_loc, sequences, queries)
    begin = tl.load(query_start_loc + sequence).to(tl.int32)
    end = tl.load(query_start_loc + sequence + 1, mask=sequence < sequences, other=tokens).to(tl.int32)
    length = tl.load(kv_lens + sequence, mask=sequence < sequences, other=0).to(tl.int32)
    first = begin + (block - (begin // queries + sequence)) * queries if queries > 1 else block
    if first >= end:
        return

    # Rows are the heads of the first query, then those of the next.
    row = tl.arange(0, rows)
    token = first + row // group
    head = kv_head * group + row % group
    real = (row < queries * group) & (token < end)
    position = token + (length - end)
    column = tl.arange(0, width)
    taken = real[:, None] & (column < head_dim)[None, :]
    at = query + token.to(tl.int64)[:, None] * query_token + head[:, None] * query_head + column[None, :]
    q = tl.load(at, mask=taken, other=0.0)

    # The keys visible to any of the queries, and the split's share of them.
    low, high = 0, length
    if causal:
        high = tl.minimum(length, tl.minimum(first + queries, end) + (length - end))
    if window is not None:
        low = tl.maximum(first + (length - end) - window + 1, 0)
        if not causal:
            high = tl.minimum(length, tl.minimum(first + queries, end) + (length - end) + window - 1)
    if chunk is not None:
        low = tl.maximum(low, (first + (length - end)) // chunk * chunk)
    if sums is not None:
        share = (tl.maximum(high - low, 0) + splits * keys - 1) // (splits * keys) * keys
        low += split * share
        high = tl.minimum(high, low + share)

    best = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    if sinks is not None:  # joins the softmax once, in the first split
        sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * LOG2_E
        best = tl.where(split == 0, sink, best)
        total = tl.where(split == 0, 1.0, total)
    if alibi is not None:
        slope = _slope(head, num_heads, slopes) * alibi
    summed = tl.zeros([rows, width], tl.float32)
    table = block_table + sequence.to(tl.int64) * table_sequence
    inner = kv_head * head_dim + column
    for start in range(bound(low), bound(high), keys):
        slot = start + tl.arange(0, keys)
        filled = slot < high
        page = tl.load(table + slot // block_size, mask=filled, other=0).to(tl.int64)
        row_at = (page * block_size + slot % block_size) * (num_kv_heads * head_dim)
        cached = row_at[:, None] + inner[None, :]
        there = filled[:, None] & (column < head_dim)[None, :]
        k = tl.load(key_cache + cached, mask=there, other=0.0)
        scores = dot(q, tl.trans(k)) * scale
        if softcap is not None:  # softcap * tanh(scores / softcap), in units of log2(e)
            scores = (softcap - 2 * softcap / (tl.exp(2 / softcap * scores) + 1)) * LOG2_E
        if alibi is not None:
            scores += slope[:, None] * (slot[None, :] - position[:, None])
        seen = real[:, None] & filled[None, :]
        if chunk is not None:
            seen = seen & (slot[None, :] // chunk == position[:, None] // chunk)
        if causal:
            seen = seen & (slot[None, :] <= position[:, None])
        if window is not None:
            seen = seen & (slot[None, :] > position[:, None] - window)
            if not causal:
                seen = seen & (slot[None, :] < position[:, None] + window)
        scores = tl.where(seen, scores, float("-inf"))
        better = tl.maximum(best, tl.max(scores, 1))
        # For a row without keys so far, infinity minus infinity would be NaN.
        base = tl.where(better == float("-inf"), 0.0, better)
        weights = tl.exp2(scores - base[:, None])
        kept = tl.exp2(best - base)
        # As in flash attention, weights are rounded to the values' dtype for the product, but not for their sum.
        v = tl.load(value_cache + cached, mask=there, other=0.0)
        summed = summed * kept[:, None] + dot(rounded(weights, v.dtype), v)
        total = total * kept + tl.sum(weights, 1)
        best = better

    # An empty sequence gives zeros. In other sequences, a row without weights has a score of minus infinity for every
    # visible key. It becomes 0 / 0 = NaN, so that an earlier error is not hidden.
    total = tl.where(high > 0, total, 1.0)

    out_row = token.to(tl.int64) * num_heads + head
    if sums is None:
        summed = summed / total[:, None]
        tl.store(
            result + out_row[:, None] * head_dim + column[None, :], rounded(summed, result.dtype.element_ty), mask=taken
        )
    else:
        part = out_row * splits + split
        tl.store(bests + part, tl.where(high > 0, best, 0.0), mask=real)
        tl.store(totals + part, total, mask=real)
        # _combine reads nothing of a part without keys.
        tl.store(sums + part[:, None] * head_dim + column[None, :], summed, mask=taken & (total != 0.0)[:, None])


@triton.jit(do_not_specialize=["splits"])
def _combine(sums, bests, totals, result, splits, head_dim: tl.constexpr, most: tl.constexpr, width: tl.constexpr):
    """Combine the parts of one head of one token, always in the same order."""
    row = tl.program_id(0).to(tl.int64)
    split, column = tl.arange(0, most), tl.arange(0, width)
    part = row * splits + split
    total = tl.load(totals + part, mask=split < splits, other=0.0)
    used = total != 0.0
    best = tl.load(bests + part, mask=used, other=float("-inf"))
    largest = tl.max(best, 0)
    factor = tl.exp2(best - tl.where(largest == float("-inf"), 0.0, largest))
    mask = used[:, None] & (column < head_dim)[None, :]
    values = tl.load(sums + part[:, None] * head_dim + column[None, :], mask=mask, other=0.0)
    whole = tl.sum(total * factor, 0)
    summed = tl.sum(values * factor[:, None], 0) / whole
    tl.store(result + row * head_dim + column, rounded(summed, result.dtype.element_ty), mask=column < head_dim)


@attrs.frozen
class Tiles:
    """Tile sizes and launch parameters.

    Attributes:
        queries: tokens per program.
        rows: query heads times queries of a program; a power of two of at least 16, for the tensor cores.
        keys: keys per iteration; a power of two of at least 16.
        warps: warps per program.
        stages: pipeline stages of loads.
    """

    queries: int
    rows: int
    keys: int
    warps: int
    stages: int


def tiles(tokens: int, sequences: int, group: int, width: int, itemsize: int) -> Tiles:
    """Return the tiles for given shapes. A decode, with at most one token per sequence, has one query per program.

    Args:
        tokens: new tokens of all sequences.
        sequences: sequences in the batch.
        group: query heads per key head.
        width: the head dimension, padded to a power of two.
        itemsize: bytes per element.
    """
    # Compiled for sm_80 and sm_90, these spill no registers for heads of 64, 128 or 256 elements of 16 bits. Float32
    # products do not use tensor cores and take more registers. The sizes have not been tuned on a GPU.
    if itemsize > 2:
        keys, most, warps, stages = 16, 32, 8, 2
    elif width > 128:
        keys, most, warps, stages = 32, 64, 8, 2
    else:
        keys, most, warps, stages = 64, 128, 8, 3
    if tokens <= sequences:
        rows = max(16, triton.next_power_of_2(group))
        return Tiles(1, rows, keys, 4, stages)
    rows = max(16, triton.next_power_of_2(group), min(most, triton.next_power_of_2(tokens * group)))
    return Tiles(rows // group, rows, keys, warps if rows == most else 4, 2)


def splits(programs: int, keys: int, processors: int) -> int:
    """Return the number of programs among which each sequence's keys are split.

    Args:
        programs: the number of programs without a split.
        keys: the maximum number of keys visible to a query.
        processors: the device's multiprocessors; two programs fill one.
    """
    return max(1, min(2 * processors // max(programs, 1), keys // MIN_SPLIT_KEYS, MAX_SPLITS))


@cache
def _processors(device: torch.device) -> int:
    # On a CPU, for the interpreter, a number that causes splits as on a GPU.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 64


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    kv_lens: Tensor,
    query_start_loc_host: Tensor,
    kv_lens_host: Tensor,
    sinks: Tensor | None,
    options: AttentionOptions,
) -> Tensor:
    """See :func:`hal.ops.paged_attention`. It reads lengths on the device and ignores those on the host."""
    tokens, num_heads, _ = query.shape
    sequences, max_blocks = block_table.shape
    capacity = max_blocks * key_cache.shape[1]
    chosen = tiles(
        tokens, sequences, num_heads // key_cache.shape[2], triton.next_power_of_2(query.shape[2]), query.itemsize
    )
    programs = blocks(tokens, sequences, chosen.queries) * key_cache.shape[2]
    visible = min(capacity, min(options.window or capacity, options.chunk or capacity) + chosen.queries)
    parts = splits(programs, visible, _processors(query.device))
    cache = key_cache, value_cache, block_table
    return attend(query, *cache, query_start_loc, kv_lens, sinks, options, chosen, parts)


def blocks(tokens: int, sequences: int, queries: int) -> int:
    """Return the number of query blocks for any lengths with sum ``tokens``; some may be empty. See ``owner``."""
    return tokens if queries == 1 else tokens // queries + sequences + 1


def attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    kv_lens: Tensor,
    sinks: Tensor | None,
    options: AttentionOptions,
    chosen: Tiles,
    parts: int,
) -> Tensor:
    """Run :func:`paged_attention` with given tiles and splits, which affect only the speed."""
    tokens, num_heads, head_dim = query.shape
    sequences, num_kv_heads = block_table.shape[0], key_cache.shape[2]
    _require(query, key_cache, value_cache, block_table, query_start_loc, kv_lens, sinks)
    query, block_table = unit_stride(query), unit_stride(block_table)
    sinks = None if sinks is None else sinks.contiguous()
    width = max(16, triton.next_power_of_2(head_dim))
    result = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    sums = bests = totals = None
    if parts > 1:
        shape = (tokens, num_heads, parts)
        sums = torch.empty((*shape, head_dim), dtype=torch.float32, device=query.device)
        bests, totals = (torch.empty(shape, dtype=torch.float32, device=query.device) for _ in range(2))
    tensors = (
        query,
        key_cache,
        value_cache,
        block_table,
        query_start_loc.contiguous(),
        kv_lens.contiguous(),
        result,
        sums,
        bests,
        totals,
    )
    sizes = tokens, sequences, parts, *query.stride()[:2], block_table.stride(0)
    constants = num_heads, num_kv_heads, head_dim, key_cache.shape[1], options.causal, triton.next_power_of_2(num_heads)
    _attend[blocks(tokens, sequences, chosen.queries), num_kv_heads, parts](
        *tensors,
        *sizes,
        sinks,
        options.scale * (LOG2_E.value if options.softcap is None else 1.0),
        options.softcap,
        options.window,
        options.chunk,
        None if options.alibi is None else options.alibi * LOG2_E.value,
        *constants,
        chosen.queries,
        chosen.rows,
        chosen.keys,
        width,
        num_warps=chosen.warps,
        num_stages=chosen.stages,
    )
    if parts > 1:
        _combine[(tokens * num_heads,)](
            sums, bests, totals, result, parts, head_dim, triton.next_power_of_2(parts), width, num_warps=4
        )
    return result


def _require(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    kv_lens: Tensor,
    sinks: Tensor | None,
) -> None:
    fits = query.dim() == 3 and key_cache.dim() == 4 and key_cache.shape[3] == query.shape[2]
    fits = fits and query.shape[1] % key_cache.shape[2] == 0 and value_cache.shape == key_cache.shape
    fits = fits and key_cache.dtype is value_cache.dtype is query.dtype
    fits = fits and key_cache.is_contiguous() and value_cache.is_contiguous()
    sequences = block_table.shape[0]
    fits = fits and query_start_loc.shape == (sequences + 1,) and kv_lens.shape == (sequences,)
    fits = fits and all(each.dtype in INTEGERS for each in (block_table, query_start_loc, kv_lens))
    fits = fits and (sinks is None or (sinks.shape == query.shape[1:2] and sinks.dtype is query.dtype))
    given = query, key_cache, value_cache, block_table, query_start_loc, kv_lens
    require(fits, "paged_attention", *given, *(() if sinks is None else (sinks,)))
