"""Root-mean-square norms, with and without residual addition and quantization."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arguments import require, rows, unit_stride, warps
from .interpreter import rounded
from .quantization import require_quantizer, store_quantized


@triton.jit(do_not_specialize=["count"])
def _norm(
    x,
    residual,
    weight,
    hidden,
    normed,
    scale,
    offset,
    scales,
    count,
    per_group,
    group_stride,
    row_stride,
    eps,
    width: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
    column = tl.arange(0, block)
    mask = (row < count)[:, None] & (column < width)[None, :]
    start = row // per_group * group_stride + row % per_group * row_stride
    at = row[:, None] * width + column[None, :]
    values = tl.load(x + start[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        values += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
        total = rounded(values, hidden.dtype.element_ty)
        tl.store(hidden + at, total, mask=mask)
        values = total.to(tl.float32)
    factor = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, 1) / width + eps)
    values = values * inverse[:, None] * factor[None, :]
    if scale is None and scales is None:
        tl.store(normed + at, rounded(values, normed.dtype.element_ty), mask=mask)
    else:
        # A row past the end is all zeros, so its scale is 0, by which nothing is divided.
        store_quantized(values, normed + at, mask, scale, offset, scales, row, row < count)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See :func:`hal.ops.rms_norm`. It reads heads in a packed projection in place."""
    _require("rms_norm", x, weight)
    x, per_group, group_stride, row_stride = rows(x)
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, None, normed, None, None, None, per_group, group_stride, row_stride, eps)
    return normed


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See :func:`hal.ops.add_rms_norm`."""
    _require("add_rms_norm", x, weight, residual)
    hidden, normed = _empty(x), _empty(x)
    _add(x, residual, weight, eps, hidden, normed)
    return normed, hidden


def add_rms_norm_quantize(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: Tensor, offset: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See :func:`hal.ops.add_rms_norm_quantize`. The norm stays in float32 until it is quantized."""
    _require("add_rms_norm_quantize", x, weight, residual)
    require_quantizer("add_rms_norm_quantize", x, x.shape[-1], scale, offset)
    hidden, quantized = _empty(x), _empty(x, torch.int8)
    _add(x, residual, weight, eps, hidden, quantized, scale, offset)
    return quantized, hidden


def add_rms_norm_dynamic_quantize(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`hal.ops.add_rms_norm_dynamic_quantize`. The norm stays in float32 until it is quantized."""
    _require("add_rms_norm_dynamic_quantize", x, weight, residual)
    hidden, quantized = _empty(x), _empty(x, torch.int8)
    scales = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    _add(x, residual, weight, eps, hidden, quantized, scales=scales)
    return quantized, scales, hidden


def _add(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    hidden: Tensor,
    normed: Tensor,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    scales: Tensor | None = None,
) -> None:
    x, width = x.contiguous(), x.shape[-1]
    _launch(x, residual.contiguous(), weight, hidden, normed, scale, offset, scales, 1, width, 0, eps)


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    hidden: Tensor | None,
    normed: Tensor,
    scale: Tensor | None,
    offset: Tensor | None,
    scales: Tensor | None,
    per_group: int,
    group_stride: int,
    row_stride: int,
    eps: float,
) -> None:
    width = x.shape[-1]
    count, block = x.numel() // max(width, 1), triton.next_power_of_2(width)
    tile_rows = max(1024 // block, 1)
    tensors = x, residual, unit_stride(weight), hidden, normed, scale, offset, scales
    sizes = count, per_group, group_stride, row_stride, eps, width, tile_rows, block
    _norm[(triton.cdiv(count, tile_rows),)](*tensors, *sizes, num_warps=warps(tile_rows * block))


def _require(operation: str, x: Tensor, weight: Tensor, residual: Tensor | None = None) -> None:
    wide = operation in ("rms_norm", "add_rms_norm") and weight.dtype is torch.float32
    fits = weight.shape == x.shape[-1:] and (weight.dtype is x.dtype or wide)
    if residual is None:
        require(fits, operation, x, weight)
    else:
        require(fits and residual.shape == x.shape and residual.dtype is x.dtype, operation, x, residual, weight)


def _empty(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a contiguous tensor of the shape of ``like``."""
    return torch.empty(like.shape, dtype=dtype or like.dtype, device=like.device)
