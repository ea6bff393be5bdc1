"""Projections of experts with weights of 8 and 4 bits, and of float4, which a launch widens first."""

from __future__ import annotations

import torch
from torch import Tensor

from hal.ops import float8, weight_only
from hal.ops.experts.mxfp4 import GROUP

from ..low_bits.projections import columns_of_block
from ..low_bits.unpack import FLOAT4, FLOAT8, INT4, INT8
from ..low_bits.widen import widen
from .grouped import grouped_linear


def weight_only_grouped_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor | None,
    counts: Tensor,
    bias: Tensor | None,
    group_size: int,
) -> Tensor:
    """See :func:`hal.ops.weight_only_grouped_linear`. It rounds the scaled weights to x's dtype."""
    columns = columns_of_block(group_size, weight_scale.shape[-1], x.shape[-1])
    if columns is None:
        wide = weight_only.dequantize(weight, weight_scale, weight_zero_point, group_size).to(x.dtype)
    else:
        kind = INT4 if weight.dtype is torch.int32 else INT8
        zeros = None if weight_zero_point is None else weight_zero_point.flatten(0, 1)
        rows = widen(weight.flatten(0, 1), weight_scale.flatten(0, 1), zeros, kind, (1, columns), x.dtype)
        wide = rows.view(*weight.shape[:2], -1)
    return grouped_linear(x, wide, counts, bias)


def mxfp4_grouped_linear(
    x: Tensor, weight: Tensor, weight_scale: Tensor, counts: Tensor, bias: Tensor | None
) -> Tensor:
    """See :func:`hal.ops.mxfp4_grouped_linear`. It rounds the scaled weights to x's dtype."""
    rows = widen(weight.flatten(0, 1), weight_scale.flatten(0, 1), None, FLOAT4, (1, GROUP), x.dtype)
    return grouped_linear(x, rows.view(*weight.shape[:2], -1), counts, bias)


def fp8_grouped_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    counts: Tensor,
    bias: Tensor | None,
    block_rows: int,
    block_columns: int,
) -> Tensor:
    """See :func:`hal.ops.fp8_grouped_linear`. It rounds the scaled weights to x's dtype."""
    columns = columns_of_block(block_columns, weight_scale.shape[-1], x.shape[-1])
    if columns is None or weight.shape[1] % block_rows:  # Rows of blocks would not be those of all experts in turn.
        wide = float8.widen(weight, weight_scale, block_rows, block_columns).to(x.dtype)
    else:
        block = (block_rows, columns)
        rows = widen(weight.flatten(0, 1), weight_scale.flatten(0, 1), None, FLOAT8, block, x.dtype)
        wide = rows.view(weight.shape)
    return grouped_linear(x, wide, counts, bias)
