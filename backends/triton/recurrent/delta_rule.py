"""The gated delta rule, token by token, and the choice between this form and chunks of tokens.

A program has some rows of one head's state of one sequence in registers, and writes them once. The sequence and its
length are read on the device, and grids depend on shapes alone, so that a captured launch serves all lengths.

Source: Yang et al., *Gated Delta Networks: Improving Mamba2 with Delta Rule*, 2024.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..arguments import require, same_sequences, slots, unit_stride
from ..interpreter import bound, rounded
from .chunks import by_chunks

FEW = 8
"""The most tokens of a sequence that advances token by token where others advance by chunks."""
ROWS = 8
"""Rows of the state in a program."""
WARPS = 1
"""Warps of a program."""


@triton.jit(do_not_specialize=["few"])
def _recur(
    query,
    key,
    value,
    decay,
    beta,
    state,
    read_slots,
    write_slots,
    query_start_loc,
    result,
    scale,
    few,
    query_row,
    query_head,
    key_row,
    key_head,
    value_row,
    value_head,
    heads: tl.constexpr,
    groups: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    saves: tl.constexpr,
    rows: tl.constexpr,
    width: tl.constexpr,
):
    sequence, head = tl.program_id(0), tl.program_id(1)
    begin = tl.load(query_start_loc + sequence)
    end = tl.load(query_start_loc + sequence + 1)
    if (begin >= end) | (end - begin > few):
        return
    row = tl.program_id(2) * rows + tl.arange(0, rows)
    column = tl.arange(0, width)
    row_there, column_there = row < value_dim, column < key_dim
    there = row_there[:, None] & column_there[None, :]
    inner = head * (value_dim * key_dim) + row[:, None] * key_dim + column[None, :]
    size: tl.constexpr = heads * value_dim * key_dim
    matrix = tl.load(state + tl.load(read_slots + sequence).to(tl.int64) * size + inner, mask=there, other=0.0)
    matrix = matrix.to(tl.float32)
    start = begin.to(tl.int64)
    query += start * query_row + head // groups * query_head
    key += start * key_row + head // groups * key_head
    value += start * value_row + head * value_head
    decay += start * heads + head
    beta += start * heads + head
    result += (start * heads + head) * value_dim
    for token in range(bound(begin), bound(end)):
        q = tl.load(query + column, mask=column_there, other=0.0).to(tl.float32) * scale
        k = tl.load(key + column, mask=column_there, other=0.0).to(tl.float32)
        v = tl.load(value + row, mask=row_there, other=0.0).to(tl.float32)
        matrix *= tl.exp(tl.load(decay))
        change = tl.load(beta).to(tl.float32) * (v - tl.sum(matrix * k[None, :], 1))
        matrix += change[:, None] * k[None, :]
        tl.store(result + row, rounded(tl.sum(matrix * q[None, :], 1), result.dtype.element_ty), mask=row_there)
        if token >= end - saves:
            slot = tl.load(write_slots + sequence * saves + (token - (end - saves))).to(tl.int64)
            tl.store(state + slot * size + inner, rounded(matrix, state.dtype.element_ty), mask=there)
        query += query_row
        key += key_row
        value += value_row
        decay += heads
        beta += heads
        result += heads * value_dim


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor,
    read_slots: Tensor,
    write_slots: Tensor | None,
    query_start_loc: Tensor,
    query_start_loc_host: Tensor,
    scale: float,
) -> Tensor:
    """See :func:`hal.ops.gated_delta_rule`. It reads lengths on the device and ignores those on the host.

    Sequences of more than :data:`FEW` tokens advance by chunks, unless all have few tokens on average, or are float32.
    """
    saves = 1 if write_slots is None else write_slots.shape[-1]
    chunks = query.shape[0] > max(FEW, saves) * read_slots.shape[0] and query.dtype is not torch.float32
    return advance(query, key, value, decay, beta, state, read_slots, write_slots, query_start_loc, scale, chunks)


def advance(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor,
    read_slots: Tensor,
    write_slots: Tensor | None,
    query_start_loc: Tensor,
    scale: float,
    chunks: bool,
) -> Tensor:
    """Run :func:`gated_delta_rule`, with or without chunks for long sequences.

    In float32, use chunks in the interpreter only: on an H200 with Triton 3.6, small tiles gave wrong results and
    illegal accesses.
    """
    (tokens, key_heads, key_dim), (_, heads, value_dim) = query.shape, value.shape
    read, written, saves = slots(read_slots, write_slots)
    fits = key.shape == query.shape and value.shape[0] == tokens and heads % key_heads == 0
    fits = fits and decay.shape == beta.shape == (tokens, heads) and decay.dtype is torch.float32
    fits = fits and state.shape[1:] == (heads, value_dim, key_dim) and state.is_contiguous()
    fits = fits and key.dtype is value.dtype is beta.dtype is query.dtype
    fits = fits and state.dtype in (torch.float32, query.dtype)
    fits = fits and same_sequences(read, written, saves, query_start_loc)
    tensors = (query, key, value, decay, beta, state, read, written, query_start_loc)
    require(fits, "gated_delta_rule", *tensors)
    query, key, value = (unit_stride(each) for each in (query, key, value))
    decay, beta, starts = decay.contiguous(), beta.contiguous(), query_start_loc.contiguous()
    result = torch.empty((tokens, heads, value_dim), dtype=query.dtype, device=query.device)
    sequences, few = read.shape[0], max(FEW, saves)
    arguments = query, key, value, decay, beta, state, read, written, starts, result
    sizes = scale, few if chunks else tokens, *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], heads
    constants = heads // key_heads, key_dim, value_dim, saves, ROWS, triton.next_power_of_2(key_dim)
    _recur[sequences, heads, triton.cdiv(value_dim, ROWS)](*arguments, *sizes, *constants, num_warps=WARPS)
    if chunks:
        by_chunks(query, key, value, decay, beta, state, read, written, starts, result, scale, few, saves)
    return result
