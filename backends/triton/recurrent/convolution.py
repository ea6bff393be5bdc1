"""A causal convolution whose last rows are kept per sequence."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..arguments import require, same_sequences, slots, unit_stride, warps
from ..interpreter import rounded
from ..tiles import owner

CHANNELS = 128
"""The most channels of a program."""


@triton.jit(do_not_specialize=["sequences"])
def _convolve(
    x,
    weight,
    bias,
    window,
    read_slots,
    write_slots,
    query_start_loc,
    result,
    sequences,
    x_row,
    channels: tl.constexpr,
    width: tl.constexpr,
    dilation: tl.constexpr,
    saves: tl.constexpr,
    silu: tl.constexpr,
    tokens: tl.constexpr,
    block: tl.constexpr,
    kept_rows: tl.constexpr,
    all_saves: tl.constexpr,
):
    """Convolve a block of a sequence's tokens. The program of its first block alone reads and writes its windows."""
    at = tl.program_id(0)
    sequence = owner(at, query_start_loc, sequences, tokens)
    if sequence >= sequences:
        return
    begin = tl.load(query_start_loc + sequence)
    end = tl.load(query_start_loc + sequence + 1)
    first = begin + (at - (begin // tokens + sequence)) * tokens
    if first >= end:
        return
    column = tl.program_id(1) * block + tl.arange(0, block)
    there = column < channels
    token = first + tl.arange(0, tokens)
    before: tl.constexpr = (width - 1) * dilation
    size: tl.constexpr = before * channels
    old = window + tl.load(read_slots + sequence).to(tl.int64) * size

    total = tl.zeros([tokens, block], tl.float32)
    if bias is not None:
        total += tl.load(bias + column, mask=there, other=0.0).to(tl.float32)[None, :]
    for back in tl.static_range(width):
        row = token - back * dilation
        new = (row >= begin) & (token < end)
        kept = (row < begin) & (token < end)
        value = tl.load(
            x + row.to(tl.int64)[:, None] * x_row + column[None, :], mask=new[:, None] & there[None, :], other=0.0
        ).to(tl.float32)
        if back > 0:
            value += tl.load(
                old + (row - begin + before)[:, None] * channels + column[None, :],
                mask=kept[:, None] & there[None, :],
                other=0.0,
            ).to(tl.float32)
        factor = tl.load(weight + (width - 1 - back) * channels + column, mask=there, other=0.0).to(tl.float32)
        total += value * factor[None, :]
    if silu:
        total = total / (1.0 + tl.exp(-total))
    to = result + token.to(tl.int64)[:, None] * channels + column[None, :]
    tl.store(to, rounded(total, result.dtype.element_ty), mask=(token < end)[:, None] & there[None, :])

    if first == begin:
        # The windows after the last tokens, [saves, rows, channels]. A row is the old window's if x does not have it.
        save = tl.arange(0, all_saves)
        last = end - saves + save
        line = tl.arange(0, kept_rows)
        origin = last[:, None] - (before - 1) + line[None, :]
        written = ((save < saves) & (last >= begin))[:, None] & (line < before)[None, :]
        fresh, past = written & (origin >= begin), written & (origin < begin)
        cell, inside = column[None, None, :], there[None, None, :]
        values = tl.load(x + origin.to(tl.int64)[:, :, None] * x_row + cell, mask=fresh[:, :, None] & inside, other=0.0)
        earlier = tl.load(
            old + (origin - begin + before)[:, :, None] * channels + cell,
            mask=past[:, :, None] & inside,
            other=0.0,
        )
        values = tl.where(fresh[:, :, None], values, earlier)
        # All threads have read the old window, which the next lines may overwrite.
        tl.debug_barrier()
        slot = tl.load(write_slots + sequence * saves + save, mask=(save < saves) & (last >= begin), other=0)
        place = slot.to(tl.int64)[:, None] * size + line[None, :] * channels
        tl.store(window + place[:, :, None] + cell, values, mask=written[:, :, None] & inside)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Tensor,
    read_slots: Tensor,
    write_slots: Tensor | None,
    query_start_loc: Tensor,
    query_start_loc_host: Tensor,
    silu: bool,
    dilation: int = 1,
) -> Tensor:
    """See :func:`hal.ops.causal_conv1d`. It reads lengths on the device and ignores those on the host."""
    (count, channels), width = x.shape, weight.shape[0]
    before = (width - 1) * dilation
    read, written, saves = slots(read_slots, write_slots)
    fits = weight.shape == (width, channels) and before > 0 and weight.dtype is window.dtype is x.dtype
    fits = fits and window.shape[1:] == (before, channels) and window.is_contiguous()
    fits = fits and (bias is None or (bias.shape == (channels,) and bias.dtype is x.dtype))
    fits = fits and same_sequences(read, written, saves, query_start_loc)
    optional = () if bias is None else (bias,)
    require(fits, "causal_conv1d", x, weight, window, read, written, query_start_loc, *optional)
    result = torch.empty((count, channels), dtype=x.dtype, device=x.device)
    x, sequences = unit_stride(x), read.shape[0]
    block = min(triton.next_power_of_2(channels), CHANNELS)
    # A block has the tokens that a sequence's second block looks back at, so that it reads no window.
    tokens = triton.next_power_of_2(before)
    tokens = max(tokens, 4 if count <= 4 * sequences else 16)
    tensors = (
        x,
        weight.contiguous(),
        None if bias is None else bias.contiguous(),
        window,
        read,
        written,
        query_start_loc.contiguous(),
        result,
    )
    sizes = sequences, x.stride(0), channels, width, dilation, saves, silu, tokens, block
    kept = triton.next_power_of_2(before), triton.next_power_of_2(saves)
    _convolve[count // tokens + sequences, triton.cdiv(channels, block)](
        *tensors, *sizes, *kept, num_warps=warps(tokens * block)
    )
    return result
