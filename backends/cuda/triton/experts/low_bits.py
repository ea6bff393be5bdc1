"""Projections of experts with weights of 8 and 4 bits. The weights are widened by torch first."""

from __future__ import annotations

from torch import Tensor

from hal.ops.float8 import widen
from hal.ops.weight_only import dequantize

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
    wide = dequantize(weight, weight_scale, weight_zero_point, group_size).to(x.dtype)
    return grouped_linear(x, wide, counts, bias)


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
    return grouped_linear(x, widen(weight, weight_scale, block_rows, block_columns).to(x.dtype), counts, bias)
