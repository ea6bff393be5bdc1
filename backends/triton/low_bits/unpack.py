"""Reading packed weights: device functions for the kernels of this package, and a launch that widens whole weights."""

from __future__ import annotations

import math

import attrs
import torch
import triton
import triton.language as tl
from torch import Tensor

from hal.ops.forms import Form, dequantize

from ..interpreter import INTERPRETED, rounded

FLOAT8, INT8, INT4, FLOAT4 = 0, 1, 2, 3
"""The kinds of weights: bits of float8_e4m3fn, int8, and eight 4-bit numbers in an int32, integers or float4."""
KINDS = {"float8": FLOAT8, "int8": INT8, "int4": INT4, "float4": FLOAT4}
IN_ONE = {FLOAT8: 1, INT8: 1, INT4: 8, FLOAT4: 8}
"""How many numbers an element has, by kind."""


@attrs.frozen(eq=False)
class Packed:
    """A weight as the kernels read it.

    Attributes:
        numbers: ``[out_features, in_features]``, or an eighth of the columns; of experts ``[num_experts, ...]``.
        scale: for each block, of each expert, floating-point or exponents of e8m0; the latter of float4.
        zero_point: as ``scale``, or None.
        kind: what the numbers are, such as :data:`INT4`.
        block: rows and columns with one scale; the latter a power of two, at least 16.
    """

    numbers: Tensor
    scale: Tensor
    zero_point: Tensor | None
    kind: int
    block: tuple[int, int]

    @classmethod
    def of(cls, form: Form, weight: Tensor, scale: Tensor, zero_point: Tensor | None) -> Packed | None:
        """Return a weight of a form, or None if the kernels take none of its form and size."""
        kind, columns, exponents = KINDS.get(form.numbers), form.columns, scale.dtype is torch.uint8
        if kind is None or (exponents and form.scales != "e8m0") or (kind == FLOAT4 and not exponents):
            return None
        if scale.shape[-1] == 1:
            columns = max(16, triton.next_power_of_2(form.width(weight)))
        if columns < 16 or columns & (columns - 1) or (kind == FLOAT4 and weight.shape[-1] % 4):
            return None
        numbers = weight.contiguous()
        return cls(
            numbers.view(torch.int32) if kind == FLOAT4 else numbers,
            scale.contiguous(),
            None if zero_point is None else zero_point.contiguous(),
            kind,
            (form.rows or weight.shape[-2], columns),
        )


@triton.jit
def _nibble(words, shift: tl.constexpr):
    """Return the numbers from -8 to 7 at a place of each int32, as float32."""
    # Plus 8, a number is the last bits of a float32 between 2**23 and 2**24.
    bits = (((words >> shift) & 15) ^ 8) | 0x4B000000
    return bits.to(tl.float32, bitcast=True) - 8388616.0


@triton.jit
def _nibbles(words):
    """Return eight numbers of each int32 ``[rows, width]`` in order, float32 ``[rows, width * 8]``."""
    first = tl.interleave(_nibble(words, 0), _nibble(words, 16))
    third = tl.interleave(_nibble(words, 8), _nibble(words, 24))
    second = tl.interleave(_nibble(words, 4), _nibble(words, 20))
    fourth = tl.interleave(_nibble(words, 12), _nibble(words, 28))
    return tl.interleave(tl.interleave(first, third), tl.interleave(second, fourth))


@triton.jit
def _half_nibbles(words, zeros, kind: tl.constexpr):
    """Return the numbers minus zero points, as :func:`_nibbles` in a 16-bit type, exactly: two at a time until the end.

    ``zeros`` is int8 ``[rows, 1]``, with numbers of four bits, or None.
    """
    # Plus 8, a number is the last bits of a bfloat16 between 128 and 256, or of a float16 between 1024 and 2048.
    magic: tl.constexpr = 0x43084308 if kind == tl.bfloat16 else 0x64086408
    offset: tl.constexpr = 136.0 if kind == tl.bfloat16 else 1032.0
    pair, second = (words & 0x000F000F) ^ magic, ((words >> 4) & 0x000F000F) ^ magic
    third, fourth = ((words >> 8) & 0x000F000F) ^ magic, ((words >> 12) & 0x000F000F) ^ magic
    even = tl.interleave(_halves(pair, kind), _halves(third, kind))
    odd = tl.interleave(_halves(second, kind), _halves(fourth, kind))
    numbers = tl.interleave(even, odd)
    shifts = tl.full([1, 1], offset, tl.float32)
    if zeros is not None:
        shifts = zeros.to(tl.float32) + offset
    if INTERPRETED:  # in which 16-bit types may be bits
        numbers = rounded(numbers.to(tl.float32) - shifts, kind)
    else:
        numbers -= shifts.to(kind)
    return numbers


@triton.jit
def _halves(pairs, kind: tl.constexpr):
    """Return the lower and the upper half of each int32 in turn."""
    lower, upper = pairs.to(tl.int16), (pairs >> 16).to(tl.int16)
    return tl.interleave(lower.to(kind, bitcast=True), upper.to(kind, bitcast=True))


@triton.jit
def _float8(bits):
    """Return the numbers of the bits of float8 (e4m3), uint8, as float32. Some GPUs have no instruction for it."""
    wide = bits.to(tl.int16)
    half = (((wide & 0x7F) << 7) | ((wide & 0x80) << 8)).to(tl.float16, bitcast=True)
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0)


@triton.jit
def _half_float4(words, kind: tl.constexpr):
    """Return eight numbers of float4 (e2m1) of each int32 in order, in a 16-bit type, exactly.

    Their bits are those of subnormal and small numbers of that type, which a power of two enlarges.
    """
    first, second = _two_float4(words, kind), _two_float4(words >> 4, kind)
    third, fourth = _two_float4(words >> 8, kind), _two_float4(words >> 12, kind)
    numbers = tl.interleave(tl.interleave(first, third), tl.interleave(second, fourth))
    factor: tl.constexpr = 2.0**126 if kind == tl.bfloat16 else 2.0**14
    if INTERPRETED:
        numbers = rounded(numbers.to(tl.float32) * factor, kind)
    else:
        numbers *= tl.full([1, 1], factor, kind)
    return numbers


@triton.jit
def _two_float4(words, kind: tl.constexpr):
    """Return the numbers of the last four bits of both halves of each int32 in turn, divided by a power of two."""
    shift: tl.constexpr = 6 if kind == tl.bfloat16 else 9
    return _halves(((words & 0x00070007) << shift) | ((words & 0x00080008) << 12), kind)


@triton.jit
def _float32(packed, kind: tl.constexpr):
    """Return the numbers of a tile of packed weights."""
    if kind == 2:
        numbers = _nibbles(packed)
    elif kind == 1:
        # Plus 128, a number is the last bits of a float32 between 2**23 and 2**24.
        bits = ((packed.to(tl.int32) & 255) ^ 128) | 0x4B000000
        numbers = bits.to(tl.float32, bitcast=True) - 8388736.0
    elif kind == 3:
        numbers = _half_float4(packed, tl.float16).to(tl.float32)
    else:
        numbers = _float8(packed)
    return numbers


@triton.jit
def factors(scales):
    """Return scales as float32, also those that are exponents of e8m0."""
    if scales.dtype == tl.uint8:
        exponents = scales.to(tl.int32)
        bits = tl.where(exponents > 0, exponents << 23, 0x400000)
        wide = tl.where(exponents < 255, bits, 0x7FC00000).to(tl.float32, bitcast=True)
    else:
        wide = scales.to(tl.float32)
    return wide


@triton.jit
def numbers(packed, zeros, kind: tl.constexpr, dtype: tl.constexpr):
    """Return the numbers of a tile minus zero points, ``[rows, 1]`` or None, in ``dtype``."""
    if kind == 2 and dtype != tl.float32 and (zeros is None or zeros.dtype == tl.int8):
        numbers = _half_nibbles(packed, zeros, dtype)
    elif zeros is None:
        numbers = rounded(_float32(packed, kind), dtype)
    else:
        numbers = rounded(_float32(packed, kind) - zeros.to(tl.float32), dtype)
    return numbers


@triton.jit
def of_blocks(rows_at, start, block_columns: tl.constexpr, blocks: tl.constexpr, parts: tl.constexpr):
    """Return scales or zero points of the blocks from a column on, ``[rows, parts]``."""
    block = start // block_columns + tl.arange(0, parts)[None, :]
    return tl.load(rows_at + block, mask=block < blocks, other=0)


@triton.jit
def scaled(packed, scales, zeros, kind: tl.constexpr, dtype: tl.constexpr, width: tl.constexpr, parts: tl.constexpr):
    """Return the scaled numbers of a tile whose rows of ``width`` have ``parts`` blocks."""
    rows: tl.constexpr = packed.shape[0]
    if kind == 3 and dtype == tl.bfloat16 and not INTERPRETED:
        # Scales are powers of two, so that the products are exact.
        numbers = tl.reshape(_half_float4(packed, dtype), [rows, parts, width // parts])
        wide = tl.reshape(numbers * scales.to(dtype)[:, :, None], [rows, width])
    else:
        numbers = tl.reshape(_float32(packed, kind), [rows, parts, width // parts])
        if zeros is not None:
            numbers -= zeros.to(tl.float32)[:, :, None]
        wide = rounded(tl.reshape(numbers * scales[:, :, None], [rows, width]), dtype)
    return wide


@triton.jit
def _widen(
    weight,
    scale,
    zero_point,
    result,
    num_experts: tl.constexpr,
    in_features: tl.constexpr,
    out_features: tl.constexpr,
    kind: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    blocks: tl.constexpr,
    in_one: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    """Write a tile of the scaled weights, ``[num_experts, out_features, in_features]``."""
    parts: tl.constexpr = columns // block_columns if block_columns < columns else 1
    width: tl.constexpr = in_features // in_one
    step: tl.constexpr = columns // in_one
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    there = (row < num_experts * out_features)[:, None]
    outer = tl.program_id(1) * step + tl.arange(0, step)[None, :]
    column = tl.program_id(1) * columns + tl.arange(0, columns)[None, :]
    own = tl.where(row < num_experts * out_features, row, 0)
    packed = tl.load(weight + own.to(tl.int64)[:, None] * width + outer, mask=there & (outer < width), other=0)
    block = own // block_rows
    if num_experts > 1 and out_features % block_rows:  # the last block of an expert is smaller
        block = own // out_features * ((out_features + block_rows - 1) // block_rows) + own % out_features // block_rows
    block_row, start = (block * blocks)[:, None], tl.program_id(1) * columns
    scales = factors(of_blocks(scale + block_row, start, block_columns, blocks, parts))
    zeros = None
    if zero_point is not None:
        zeros = of_blocks(zero_point + block_row, start, block_columns, blocks, parts)
    values = scaled(packed, scales, zeros, kind, result.dtype.element_ty, columns, parts)
    tl.store(result + row.to(tl.int64)[:, None] * in_features + column, values, mask=there & (column < in_features))


def widened(
    form: Form,
    packed: Packed | None,
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return the scaled weight, ``[..., out_features, in_features]``, from ``packed``, or from torch if it is None."""
    if packed is None:
        return dequantize(form, weight, scale, zero_point).to(dtype)
    *leading, out_features, _ = weight.shape
    in_features, num_experts = form.width(weight), math.prod(leading)
    result = torch.empty((*leading, out_features, in_features), dtype=dtype, device=weight.device)
    tensors = packed.numbers, packed.scale, packed.zero_point, result
    sizes = num_experts, in_features, out_features, packed.kind, *packed.block, packed.scale.shape[-1]
    _widen[triton.cdiv(num_experts * out_features, 4), triton.cdiv(in_features, 1024)](
        *tensors, *sizes, IN_ONE[packed.kind], 4, 1024, num_warps=4
    )
    return result
