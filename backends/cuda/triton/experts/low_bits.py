"""Projections of experts with weights of 8 and 4 bits, and of float4."""

from __future__ import annotations

import torch
from torch import Tensor

from hal.ops import float8, weight_only
from hal.ops.experts.mxfp4 import GROUP

from ..arguments import require
from ..low_bits.product import project, tiles
from ..low_bits.projections import columns_of_block
from ..low_bits.unpack import FLOAT4, FLOAT8, IN_ONE, INT4, INT8
from ..low_bits.widen import widen
from .grouped import grouped_linear, require_bias

MANY = 64
"""The most rows of an expert, on average, that multiply packed weights. For more, a launch widens the weights first."""


def _run(
    operation: str,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    counts: Tensor,
    bias: Tensor | None,
    kind: int,
    block: tuple[int, int],
) -> Tensor:
    """Launch the product of packed weights, or for many rows, widen them; see :func:`~..low_bits.product.project`."""
    (num_experts, out_features, width), (block_rows, columns) = weight.shape, block
    fits = x.dim() == 2 and x.shape[1] == width * IN_ONE[kind]
    fits = fits and counts.shape == (num_experts,) and counts.dtype is torch.int64
    fits = fits and scale.shape == (num_experts, -(-out_features // block_rows), -(-x.shape[1] // columns))
    fits = fits and (zero_point is None or zero_point.shape == scale.shape)
    require(fits, operation, x, weight, scale, counts, *([] if zero_point is None else [zero_point]))
    require_bias(operation, x, weight, bias)
    average = len(x) / num_experts
    if average <= MANY:
        chosen = tiles(round(average), x.itemsize, kind, out_features, grouped=True)
        return project(x, weight, scale, zero_point, bias, kind, block, chosen, counts)
    zeros = None if zero_point is None else zero_point.flatten(0, 1)
    rows = widen(weight.flatten(0, 1), scale.flatten(0, 1), zeros, kind, (block_rows, columns), x.dtype)
    return grouped_linear(x, rows.view(num_experts, out_features, -1), counts, bias)


def weight_only_grouped_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor | None,
    counts: Tensor,
    bias: Tensor | None,
    group_size: int,
) -> Tensor:
    """See :func:`hal.ops.weight_only_grouped_linear`. It rounds the scaled weights of groups to x's dtype."""
    columns = columns_of_block(group_size, weight_scale.shape[-1], x.shape[-1])
    if columns is None:
        wide = weight_only.dequantize(weight, weight_scale, weight_zero_point, group_size).to(x.dtype)
        return grouped_linear(x, wide, counts, bias)
    kind = INT4 if weight.dtype is torch.int32 else INT8
    given = x, weight, weight_scale, weight_zero_point, counts, bias
    return _run("weight_only_grouped_linear", *given, kind, (1, columns))


def mxfp4_grouped_linear(
    x: Tensor, weight: Tensor, weight_scale: Tensor, counts: Tensor, bias: Tensor | None
) -> Tensor:
    """See :func:`hal.ops.mxfp4_grouped_linear`. It rounds the scaled weights to x's dtype."""
    given = x, weight.contiguous().view(torch.int32), weight_scale, None, counts, bias
    return _run("mxfp4_grouped_linear", *given, FLOAT4, (1, GROUP))


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
    many = len(x) > MANY * len(weight)
    # The launch that widens takes all experts as one weight, so that no block may span two of them.
    if columns is None or (many and weight.shape[1] % block_rows):
        wide = float8.widen(weight, weight_scale, block_rows, block_columns).to(x.dtype)
        return grouped_linear(x, wide, counts, bias)
    given = x, weight, weight_scale, None, counts, bias
    return _run("fp8_grouped_linear", *given, FLOAT8, (block_rows, columns))


def quant_grouped_linear_int4(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    row_sums: Tensor,
    counts: Tensor,
    group_size: int,
    dtype: torch.dtype,
) -> Tensor:
    """See :func:`hal.ops.quant_grouped_linear_int4`, and :func:`..low_bits.projections.quant_linear_int4`."""
    num_experts, out_features, words = weight.shape
    groups, width = weight_scale.shape[-1], words * IN_ONE[INT4]
    fits = x.dim() == 2 and x.shape[1] == width and x.dtype is torch.int8 and weight.dtype is torch.int32
    fits = fits and x_scale.shape == x.shape[:1] and x_scale.dtype is torch.float32
    fits = fits and weight_scale.shape == (num_experts, out_features, -(-width // group_size))
    fits = fits and counts.shape == (num_experts,) and counts.dtype is torch.int64
    require(fits, "quant_grouped_linear_int4", x_scale, x, weight, weight_scale, counts)
    columns = columns_of_block(group_size, groups, width)
    if columns is None:
        wide = weight_only.dequantize(weight, weight_scale, None, group_size)
        return (grouped_linear(x.float(), wide, counts, None) * x_scale.unsqueeze(-1)).to(dtype)
    # Many rows of an expert read its weight again for each tile of them, which the GPU's cache mostly holds.
    chosen = tiles(round(len(x) / num_experts), dtype.itemsize, INT4, out_features, grouped=True)
    return project(
        x, weight, weight_scale, None, None, INT4, (1, columns), chosen, counts, x_scale=x_scale, dtype=dtype
    )
