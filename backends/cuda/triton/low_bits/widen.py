"""A separate launch that widens packed weights, before products of many rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .unpack import IN_ONE, factors, of_blocks, scaled


@triton.jit
def _widen(
    weight,
    scale,
    zero_point,
    result,
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
    """Write a tile of the scaled weight, ``[out_features, in_features]``."""
    parts: tl.constexpr = columns // block_columns if block_columns < columns else 1
    width: tl.constexpr = in_features // in_one
    step: tl.constexpr = columns // in_one
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    there = (row < out_features)[:, None]
    outer = tl.program_id(1) * step + tl.arange(0, step)[None, :]
    column = tl.program_id(1) * columns + tl.arange(0, columns)[None, :]
    own = tl.where(row < out_features, row, 0)
    packed = tl.load(weight + own.to(tl.int64)[:, None] * width + outer, mask=there & (outer < width), other=0)
    block_row, start = (own // block_rows * blocks)[:, None], tl.program_id(1) * columns
    scales = factors(of_blocks(scale + block_row, start, block_columns, blocks, parts), kind)
    zeros = None
    if zero_point is not None:
        zeros = of_blocks(zero_point + block_row, start, block_columns, blocks, parts)
    values = scaled(packed, scales, zeros, kind, result.dtype.element_ty, columns, parts)
    tl.store(result + row.to(tl.int64)[:, None] * in_features + column, values, mask=there & (column < in_features))


def widen(
    weight: Tensor, scale: Tensor, zero_point: Tensor | None, kind: int, block: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """Return the scaled weight, ``[out_features, in_features]``. For the arguments, see :func:`~.product.project`."""
    out_features, width = weight.shape
    in_features = width * IN_ONE[kind]
    result = torch.empty((out_features, in_features), dtype=dtype, device=weight.device)
    _widen[triton.cdiv(out_features, 4), triton.cdiv(in_features, 1024)](
        weight.contiguous(),
        scale.contiguous(),
        None if zero_point is None else zero_point.contiguous(),
        result,
        in_features,
        out_features,
        kind,
        *block,
        scale.shape[-1],
        IN_ONE[kind],
        4,
        1024,
        num_warps=4,
    )
    return result
