"""Projections with packed weights: products of few rows, and which kernel or function of torch takes which arguments.

A program reads a tile of packed weights, widens it in registers to the activations' dtype, and multiplies it with
tensor cores. So a product takes about the time of reading the packed weights.
"""

from __future__ import annotations

import attrs
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from hal.ops.forms import Form
from hal.ops.kernels.partial_kernel import plain
from hal.ops.projection import floating_bias

from ..arguments import require_form, unit_stride
from ..interpreter import dot, rounded
from ..tiles import most_tiles, rows_of_tile
from .unpack import FLOAT4, IN_ONE, INT4, Packed, factors, numbers, of_blocks, scaled, widened

MANY = 64
"""The most rows, of experts on average, that multiply packed weights. For more, a launch widens the weight first."""
NARROW = 8192
"""The most outputs of a weight in 4 bits whose tiles are narrow, because wide ones would leave processors idle."""


@triton.jit(do_not_specialize=["count"])
def _project(
    x,
    x_scale,
    weight,
    scale,
    zero_point,
    bias,
    counts,
    result,
    count,
    x_row,
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
    depth: tl.constexpr,
    swapped: tl.constexpr,
):
    """Write a tile of ``rows`` by ``columns``. A row of scales has ``blocks``, each for ``block_columns``."""
    parts: tl.constexpr = depth // block_columns if block_columns < depth else 1
    width: tl.constexpr = in_features // in_one
    step: tl.constexpr = depth // in_one
    exact: tl.constexpr = in_features % depth == 0
    if counts is None:
        expert, first, end = 0, tl.program_id(1) * rows, count
    else:
        expert, first, end = rows_of_tile(counts, tl.program_id(1), num_experts, rows)
        if expert >= num_experts:
            return
    row = first + tl.arange(0, rows)
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    # Rows and columns past the end repeat the first, and are not stored.
    own = tl.where(column < out_features, column, 0)
    of_all = tl.cast(expert, tl.int64) * out_features + own
    inner, outer = tl.arange(0, depth), tl.arange(0, step)
    x_at = x + tl.where(row < end, row, first).to(tl.int64)[:, None] * x_row + inner[None, :]
    weight_at = weight + of_all[:, None] * width + outer[None, :]
    block_row = ((expert * ((out_features + block_rows - 1) // block_rows) + own // block_rows) * blocks)[:, None]
    next_scales = of_blocks(scale + block_row, 0, block_columns, blocks, parts)
    if zero_point is not None:
        next_zeros = of_blocks(zero_point + block_row, 0, block_columns, blocks, parts)
    total = tl.zeros([columns, rows] if swapped else [rows, columns], tl.float32)
    for done in range(0, in_features, depth):
        if exact:
            values, packed = tl.load(x_at), tl.load(weight_at)
        else:
            values = tl.load(x_at, mask=(inner < in_features - done)[None, :], other=0.0)
            packed = tl.load(weight_at, mask=(outer < width - done // depth * step)[None, :], other=0)
        if x.dtype.element_ty == tl.int8:  # whose numbers are exact in each dtype
            values = rounded(values.to(tl.float32), result.dtype.element_ty)
        # The scales of the next iteration are loaded in this one.
        scales = factors(next_scales)
        next_scales = of_blocks(scale + block_row, done + depth, block_columns, blocks, parts)
        zeros = None
        if zero_point is not None:
            zeros = next_zeros
            next_zeros = of_blocks(zero_point + block_row, done + depth, block_columns, blocks, parts)
        if parts == 1:
            # Numbers are exact in each dtype, and the sums are scaled.
            wide = numbers(packed, zeros, kind, values.dtype)
            if swapped:
                total += dot(wide, tl.trans(values)) * scales
            else:
                total += dot(values, tl.trans(wide)) * tl.trans(scales)
        else:
            wide = scaled(packed, scales, zeros, kind, values.dtype, depth, parts)
            if swapped:
                total += dot(wide, tl.trans(values))
            else:
                total += dot(values, tl.trans(wide))
        x_at += depth
        weight_at += step
    if swapped:
        total = tl.trans(total)
    if x_scale is not None:
        total *= tl.load(x_scale + tl.where(row < end, row, first))[:, None]
    if bias is not None:
        total += tl.load(bias + of_all).to(tl.float32)[None, :]
    to = result + row.to(tl.int64)[:, None] * out_features + column[None, :]
    tl.store(to, rounded(total, result.dtype.element_ty), mask=(row < end)[:, None] & (column < out_features)[None, :])


@attrs.frozen
class Tiles:
    """Tile sizes and launch parameters.

    Attributes:
        rows: rows per program; a power of two of at least 16, for the tensor cores.
        columns: outputs per program.
        depth: inputs per iteration.
        warps: warps per program.
        stages: pipeline stages of loads.
        swapped: whether the weight is the product's first factor. On Hopper, the tensor cores read it from registers
            then, into which it was widened, and need not wait for shared memory.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    swapped: bool


def tiles(count: int, itemsize: int, kind: int, out_features: int, grouped: bool = False) -> Tiles:
    """Return the tiles for given shapes, which were the fastest of nine on an H200.

    Args:
        count: rows of the activations; of experts the average.
        itemsize: bytes per element of the activations.
        kind: what the weight holds.
        out_features: outputs.
        grouped: whether the weight is of experts.
    """
    rows = 16 if count <= 16 else 32
    if itemsize > 2:  # products without tensor cores, which take more registers
        return Tiles(rows, 32, 32, 4, 2, swapped=False)
    if kind not in (INT4, FLOAT4):
        return Tiles(rows, 64, 128, 4, 4 if rows == 16 else 3, swapped=False)
    if grouped:
        return Tiles(rows, 64, 128, 4, 4, swapped=True)
    if out_features <= NARROW:
        return Tiles(rows, 32, 256, 4, 4, swapped=False)
    return Tiles(rows, 64, 256, 4, 3, swapped=True)


def project_packed(
    x: Tensor,
    weight: Packed,
    bias: Tensor | None,
    chosen: Tiles,
    counts: Tensor | None = None,
    *,
    x_scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Launch the product. Arguments must have been checked.

    Args:
        x: ``[..., in_features]``, floating or int8.
        weight: the weight, or those of experts.
        bias: ``[out_features]``, of each expert, or None.
        chosen: tiles.
        counts: the number of rows of each expert, int64 ``[num_experts]``; None of a weight for all rows.
        x_scale: ``[...]``, float32, or None.
        dtype: the dtype of the result; that of x if None.
    """
    rows, out_features = unit_stride(x.reshape(-1, x.shape[-1])), weight.numbers.shape[-2]
    count, in_features = rows.shape
    result = torch.empty((*x.shape[:-1], out_features), dtype=dtype or x.dtype, device=x.device)
    num_experts = 1 if counts is None else len(counts)
    tiles_of_rows = most_tiles(count, num_experts, chosen.rows)
    tensors = (
        rows,
        None if x_scale is None else x_scale.contiguous(),
        weight.numbers,
        weight.scale,
        weight.zero_point,
        None if bias is None else bias.contiguous(),
        None if counts is None else counts.contiguous(),
        result,
    )
    sizes = count, rows.stride(0), num_experts, in_features, out_features, weight.kind, *weight.block
    constants = weight.scale.shape[-1], IN_ONE[weight.kind], chosen.rows, chosen.columns, chosen.depth, chosen.swapped
    _project[triton.cdiv(out_features, chosen.columns), tiles_of_rows](
        *tensors, *sizes, *constants, num_warps=chosen.warps, num_stages=chosen.stages
    )
    return result


INT8S = 128
"""What int8 numbers are at most."""


def takes(form: Form) -> bool:
    """Return whether :func:`linear` takes a form. By the weights of other forms, cuBLAS multiplies as they are."""
    return not plain(form) and not form.exact


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight_scale: Tensor,
    weight_zero_point: Tensor | None,
    x_scale: Tensor | None,
    dtype: torch.dtype | None,
    form: Form,
) -> Tensor:
    """See :func:`hal.ops.linear`. For many rows, a launch widens the weight, and torch multiplies.

    Scaled weights of groups and blocks are rounded to the result's dtype, and of many int8 rows the product.
    """
    require_form("linear", form, x, weight, bias, weight_scale, weight_zero_point, x_scale, dtype)
    bias = floating_bias(bias, weight_scale, form)
    dtype, count = dtype or x.dtype, x.numel() // max(x.shape[-1], 1)
    packed = Packed.of(form, weight, weight_scale, weight_zero_point)
    if packed is not None and count <= MANY:
        chosen = tiles(count, dtype.itemsize, packed.kind, len(weight))
        return project_packed(x, packed, bias, chosen, x_scale=x_scale, dtype=dtype)
    wide = widened(form, packed, weight, weight_scale, weight_zero_point, dtype)
    if x_scale is None:
        return functional.linear(x.to(dtype), wide, None if bias is None else bias.to(dtype))
    # A power of two keeps numbers exact, and the product within float16.
    product = functional.linear(x.to(dtype) / INT8S, wide) * (x_scale * INT8S).unsqueeze(-1)
    return (product if bias is None else product + bias).to(dtype)
