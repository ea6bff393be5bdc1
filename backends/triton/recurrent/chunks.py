"""The gated delta rule by chunks of tokens, whose changes of the state follow from one triangular system.

One launch solves the systems of all chunks. In another, each program passes some columns of a head's state from chunk
to chunk.

Source: Yang et al., *Gated Delta Networks: Improving Mamba2 with Delta Rule*, 2024.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..interpreter import INTERPRETED, bound, rounded
from ..tiles import owner

CHUNK = 64
"""Tokens of a chunk. The sum of decays within a chunk is float32, which bounds its size."""
LEVELS = 6
"""The logarithm of :data:`CHUNK`."""
COLUMNS = 32
"""The most columns of the state in a program: elements of the value."""


@triton.jit
def _product(a, b, precision: tl.constexpr):
    """Return the matrix product of float32 or 16-bit tiles in float32."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision=precision)


@triton.jit
def _weights(total, chunk: tl.constexpr):
    """Return the decay from a token, the column, to each later one of its chunk, from the sums of decays."""
    place = tl.arange(0, chunk)
    later = place[:, None] >= place[None, :]
    return tl.exp(tl.where(later, total[:, None] - total[None, :], float("-inf")))


@triton.jit
def _joined(inverse, given, row, column, size: tl.constexpr):
    """Return the inverses of the diagonal blocks of ``2 * size`` rows from those of ``size`` rows."""
    between = (row // (2 * size) == column // (2 * size)) & (row // size > column // size)
    product = _product(inverse, tl.where(between, given, 0.0), "tf32x3")
    return inverse - _product(product, inverse, "tf32x3")


@triton.jit(do_not_specialize=["sequences", "few"])
def _solve(
    key,
    decay,
    beta,
    query_start_loc,
    solved,
    sequences,
    few,
    key_row,
    key_head,
    heads: tl.constexpr,
    groups: tl.constexpr,
    key_dim: tl.constexpr,
    tail: tl.constexpr,
    chunk: tl.constexpr,
    levels: tl.constexpr,
    width: tl.constexpr,
):
    """Write a chunk's matrix from ``beta * (value - recalled)`` to the changes, ``[chunk, chunk]``, float32."""
    block, head = tl.program_id(0), tl.program_id(1)
    sequence = owner(block, query_start_loc, sequences, chunk)
    if sequence >= sequences:
        return
    begin = tl.load(query_start_loc + sequence)
    end = tl.load(query_start_loc + sequence + 1)
    first = begin + (block - (begin // chunk + sequence)) * chunk
    if (end - begin <= few) | (first >= end - tail):
        return
    place = tl.arange(0, chunk)
    token = (first + place).to(tl.int64)
    real = token < end - tail
    column = tl.arange(0, width)
    at = key + token[:, None] * key_row + head // groups * key_head + column[None, :]
    k = tl.load(at, mask=real[:, None] & (column < key_dim)[None, :], other=0.0)
    rate = tl.load(beta + token * heads + head, mask=real, other=0.0).to(tl.float32)
    weights = _weights(tl.cumsum(tl.load(decay + token * heads + head, mask=real, other=0.0), 0), chunk)
    row, other = place[:, None], place[None, :]
    given = tl.where(row > other, rate[:, None] * _product(k, tl.trans(k), "tf32x3") * weights, 0.0)
    # The inverse of 1 + given. That of a matrix of two blocks follows from those of its diagonal blocks. This rounds
    # as forward substitution does. A sum of powers would overflow where keys repeat.
    inverse = tl.where(row == other, 1.0, 0.0) - tl.where(row // 2 == other // 2, given, 0.0)
    for level in tl.static_range(1, levels):
        inverse = _joined(inverse, given, row, other, 1 << level)
    to = solved + (block.to(tl.int64) * heads + head) * (chunk * chunk)
    tl.store(to + row * chunk + other, inverse)


@triton.jit(do_not_specialize=["few"])
def _pass(
    query,
    key,
    value,
    decay,
    beta,
    state,
    read_slots,
    write_slots,
    query_start_loc,
    solved,
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
    chunk: tl.constexpr,
    width: tl.constexpr,
    columns: tl.constexpr,
    precision: tl.constexpr,
):
    """Write the results of a sequence's head for some elements of the value, and the states after its last tokens."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    begin = tl.load(query_start_loc + sequence)
    end = tl.load(query_start_loc + sequence + 1)
    if end - begin <= few:
        return
    inside = tl.arange(0, width)
    column = tl.program_id(2) * columns + tl.arange(0, columns)
    inside_there, column_there = inside < key_dim, column < value_dim
    there = inside_there[:, None] & column_there[None, :]
    inner = head * (value_dim * key_dim) + column[None, :] * key_dim + inside[:, None]
    size: tl.constexpr = heads * value_dim * key_dim
    matrix = tl.load(state + tl.load(read_slots + sequence).to(tl.int64) * size + inner, mask=there, other=0.0)
    matrix = matrix.to(tl.float32)
    place = tl.arange(0, chunk)
    query += head // groups * query_head
    key += head // groups * key_head
    value += head * value_head
    last = end - (saves - 1)  # The tokens after it advance one by one, for their states are kept.
    block = begin // chunk + sequence
    for first in range(bound(begin), bound(last), chunk):
        token = (first + place).to(tl.int64)
        real = token < last
        own = real[:, None] & inside_there[None, :]
        shown = real[:, None] & column_there[None, :]
        k = tl.load(key + token[:, None] * key_row + inside[None, :], mask=own, other=0.0)
        v = tl.load(value + token[:, None] * value_row + column[None, :], mask=shown, other=0.0).to(tl.float32)
        rate = tl.load(beta + token * heads + head, mask=real, other=0.0).to(tl.float32)
        left = tl.load(decay + token * heads + head, mask=real, other=0.0)
        total, whole = tl.cumsum(left, 0), tl.sum(left, 0)
        weights = _weights(total, chunk)
        since = tl.exp(total)[:, None]
        cell = (block.to(tl.int64) * heads + head) * (chunk * chunk)
        inverse = tl.load(solved + cell + place[:, None] * chunk + place[None, :])
        recalled = since * _product(k.to(tl.float32), matrix, precision)
        change = _product(inverse, rate[:, None] * (v - recalled), precision)
        q = tl.load(query + token[:, None] * query_row + inside[None, :], mask=own, other=0.0)
        scores = _product(q, tl.trans(k), precision) * weights
        found = since * _product(q.to(tl.float32), matrix, precision) + _product(scores, change, precision)
        to = result + (token[:, None] * heads + head) * value_dim + column[None, :]
        tl.store(to, rounded(found * scale, result.dtype.element_ty), mask=shown)
        kept = k.to(tl.float32) * tl.exp(whole - total)[:, None]
        matrix = matrix * tl.exp(whole) + _product(tl.trans(kept), change, precision)
        block += 1
    slot = tl.load(write_slots + sequence * saves).to(tl.int64)
    tl.store(state + slot * size + inner, rounded(matrix, state.dtype.element_ty), mask=there)
    if saves > 1:
        for token in range(bound(last), bound(end)):
            at = tl.cast(token, tl.int64)
            q = tl.load(query + at * query_row + inside, mask=inside_there, other=0.0).to(tl.float32) * scale
            k = tl.load(key + at * key_row + inside, mask=inside_there, other=0.0).to(tl.float32)
            v = tl.load(value + at * value_row + column, mask=column_there, other=0.0).to(tl.float32)
            matrix *= tl.exp(tl.load(decay + at * heads + head))
            change = tl.load(beta + at * heads + head).to(tl.float32) * (v - tl.sum(matrix * k[:, None], 0))
            matrix += k[:, None] * change[None, :]
            found = tl.sum(matrix * q[:, None], 0)
            to = result + (at * heads + head) * value_dim + column
            tl.store(to, rounded(found, result.dtype.element_ty), mask=column_there)
            slot = tl.load(write_slots + sequence * saves + (token - last + 1)).to(tl.int64)
            tl.store(state + slot * size + inner, rounded(matrix, state.dtype.element_ty), mask=there)


def by_chunks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
    query_start_loc: Tensor,
    result: Tensor,
    scale: float,
    few: int,
    saves: int,
) -> None:
    """Advance the sequences with more than ``few`` tokens. Arguments must have been checked; see `gated_delta_rule`."""
    (tokens, key_heads, key_dim), (_, heads, value_dim) = query.shape, value.shape
    sequences, width = read_slots.shape[0], max(16, triton.next_power_of_2(key_dim))
    blocks, groups = tokens // CHUNK + sequences, heads // key_heads
    solved = torch.empty((blocks, heads, CHUNK, CHUNK), dtype=torch.float32, device=query.device)
    tensors = key, decay, beta, query_start_loc, solved
    sizes = sequences, few, *key.stride()[:2], heads, groups, key_dim, saves - 1, CHUNK, LEVELS, width
    _solve[blocks, heads](*tensors, *sizes, num_warps=4)
    columns = max(16, min(COLUMNS, triton.next_power_of_2(value_dim)))
    arguments = query, key, value, decay, beta, state, read_slots, write_slots, query_start_loc, solved, result
    sizes = scale, few, *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], heads, groups, key_dim, value_dim
    # States are float32. Beside 16 bits, their products need not be more precise than TF32.
    precision = "tf32x3" if query.dtype is torch.float32 else "tf32"
    _pass[sequences, heads, triton.cdiv(value_dim, columns)](
        *arguments, *sizes, saves, CHUNK, width, columns, precision, num_warps=4 if width > 64 else 8, num_stages=1
    )
