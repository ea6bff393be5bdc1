"""Quantization to int8, and its device functions for kernels of other families."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arguments import require, rows, warps


@triton.jit
def to_int8(values, divisor, offset):
    """Return ``clamp(round(values / divisor + offset))`` of float32 values, rounded half to even."""
    scaled = tl.div_rn(values, tl.zeros_like(values) + divisor) + offset
    # Clamping first gives the same result, because both bounds are integers. Adding 1.5 * 2**23 to values below 2**22
    # then rounds them: float32 has no fraction bits at that magnitude.
    scaled = tl.minimum(tl.maximum(scaled, -128.0), 127.0)
    return ((scaled + 12582912.0) - 12582912.0).to(tl.int32).to(tl.int8)


@triton.jit
def row_scale(values):
    """Return ``max|values| / 127`` of each row of a tile; NaN for a row with NaN, which a maximum would ignore."""
    largest = tl.max(tl.abs(values), 1)
    broken = tl.max((values != values).to(tl.int32), 1)
    return tl.div_rn(tl.where(broken > 0, float("nan"), largest), tl.zeros_like(largest) + 127.0)


@triton.jit
def store_quantized(values, at, mask, scale, offset, scales, row, row_mask):
    """Store a float32 tile as int8 with ``scale`` and ``offset``; or with dynamic scales, stored to ``scales``."""
    if scales is not None:
        own = row_scale(values)
        tl.store(scales + row, own, mask=row_mask)
        tl.store(at, to_int8(values, tl.where(own == 0.0, 1.0, own)[:, None], 0.0), mask=mask)
    else:
        shift = 0.0
        if offset is not None:
            shift = tl.load(offset).to(tl.float32)
        tl.store(at, to_int8(values, tl.load(scale), shift), mask=mask)


@triton.jit(do_not_specialize=["count"])
def _quantize(
    x,
    quantized,
    scale,
    offset,
    scales,
    count,
    per_group,
    group_stride,
    row_stride,
    width: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
    column = tl.program_id(1) * block + tl.arange(0, block)
    mask = (row < count)[:, None] & (column < width)[None, :]
    start = row // per_group * group_stride + row % per_group * row_stride
    values = tl.load(x + start[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    at = quantized + row[:, None] * width + column[None, :]
    store_quantized(values, at, mask, scale, offset, scales, row, row < count)


def quantize(x: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
    """See :func:`hal.ops.quantize`."""
    require_quantizer("quantize", x, x.shape[-1], scale, offset)
    x, per_group, group_stride, row_stride = rows(x)
    width, quantized = x.shape[-1], torch.empty(x.shape, dtype=torch.int8, device=x.device)
    count = x.numel() // max(width, 1)
    block = min(triton.next_power_of_2(width), 1024)
    tile_rows = 1024 // block
    tensors = x, quantized, scale, offset, None
    sizes = count, per_group, group_stride, row_stride, width, tile_rows, block
    _quantize[triton.cdiv(count, tile_rows), triton.cdiv(width, block)](
        *tensors, *sizes, num_warps=warps(tile_rows * block)
    )
    return quantized


def dynamic_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`hal.ops.dynamic_quantize`."""
    require(x.dim() >= 2, "dynamic_quantize", x)
    x, per_group, group_stride, row_stride = rows(x)
    width, quantized = x.shape[-1], torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scales = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    tile_rows = max(1024 // block, 1)
    tensors = x, quantized, None, None, scales
    sizes = scales.numel(), per_group, group_stride, row_stride, width, tile_rows, block
    _quantize[triton.cdiv(scales.numel(), tile_rows), 1](*tensors, *sizes, num_warps=warps(tile_rows * block))
    return quantized, scales


def require_quantizer(operation: str, x: Tensor, width: int, scale: Tensor, offset: Tensor | None) -> None:
    """Check that ``scale`` and ``offset`` are valid arguments of :func:`hal.ops.quantize` for rows of ``width``.

    Kernels read only the first value, because all values are equal.

    Raises:
        OperationError: they are not.
    """
    fits = scale.shape in ((1,), (width,)) and scale.dtype is torch.float32
    if offset is not None:
        fits = fits and offset.shape == scale.shape and offset.dtype is torch.int32
    require(fits and scale.numel() > 0, operation, x, scale, *([] if offset is None else [offset]))
