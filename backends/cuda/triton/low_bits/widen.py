"""A separate launch that widens packed weights, before products of many rows."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from hal.ops.forms import Form, dequantize

from .unpack import IN_ONE, Packed, factors, of_blocks, scaled


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
    _widen[triton.cdiv(num_experts * out_features, 4), triton.cdiv(in_features, 1024)](
        packed.numbers,
        packed.scale,
        packed.zero_point,
        result,
        num_experts,
        in_features,
        out_features,
        packed.kind,
        *packed.block,
        packed.scale.shape[-1],
        IN_ONE[packed.kind],
        4,
        1024,
        num_warps=4,
    )
    return result
