"""Gated activations, with and without quantization."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arguments import require, warps
from .interpreter import rounded
from .quantization import require_quantizer, store_quantized

SILU, GELU, GELU_TANH, CLIPPED_SILU = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
"""Codes of the functions of the gate."""


@triton.jit(do_not_specialize=["count"])
def _gated(
    x,
    result,
    scale,
    offset,
    scales,
    count,
    alpha,
    limit,
    function: tl.constexpr,
    interleaved: tl.constexpr,
    width: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
    column = tl.program_id(1) * block + tl.arange(0, block)
    mask = (row < count)[:, None] & (column < width)[None, :]
    gate_at = x + row[:, None] * (2 * width) + column[None, :] * (2 if interleaved else 1)
    gate = tl.load(gate_at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_at + (1 if interleaved else width), mask=mask, other=0.0).to(tl.float32)
    if function == GELU:
        values = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    elif function == CLIPPED_SILU:
        # A comparison with NaN is false, so that NaN remains.
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        values = gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)
    else:
        # The approximation by tanh is a sigmoid of twice its argument.
        exponent = gate
        if function == GELU_TANH:
            exponent = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        values = gate / (1.0 + tl.exp(-exponent)) * up
    at = result + row[:, None] * width + column[None, :]
    if scale is None and scales is None:
        tl.store(at, rounded(values, result.dtype.element_ty), mask=mask)
    else:
        store_quantized(values, at, mask, scale, offset, scales, row, row < count)


def silu_and_mul(x: Tensor) -> Tensor:
    """See :func:`hal.ops.silu_and_mul`."""
    return _launch("silu_and_mul", x, x.dtype)


def gelu_and_mul(x: Tensor, approximate: str) -> Tensor:
    """See :func:`hal.ops.gelu_and_mul`."""
    return _launch("gelu_and_mul", x, x.dtype, function=GELU_TANH if approximate == "tanh" else GELU)


def clipped_silu_and_mul(x: Tensor, alpha: float, limit: float, interleaved: bool) -> Tensor:
    """See :func:`hal.ops.clipped_silu_and_mul`."""
    clipping = (alpha, limit, interleaved)
    return _launch("clipped_silu_and_mul", x, x.dtype, function=CLIPPED_SILU, clipping=clipping)


def silu_and_mul_quantize(x: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
    """See :func:`hal.ops.silu_and_mul_quantize`. The product stays in float32 until it is quantized."""
    require_quantizer("silu_and_mul_quantize", x, x.shape[-1] // 2, scale, offset)
    return _launch("silu_and_mul_quantize", x, torch.int8, scale, offset)


def silu_and_mul_dynamic_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`hal.ops.silu_and_mul_dynamic_quantize`. The product stays in float32 until it is quantized."""
    require(x.dim() >= 2, "silu_and_mul_dynamic_quantize", x)
    scales = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    return _launch("silu_and_mul_dynamic_quantize", x, torch.int8, scales=scales), scales


def _launch(
    operation: str,
    x: Tensor,
    dtype: torch.dtype,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    scales: Tensor | None = None,
    *,
    function: tl.constexpr = SILU,
    clipping: tuple[float, float, bool] = (0.0, 0.0, False),
) -> Tensor:
    require(x.shape[-1] % 2 == 0, operation, x)
    x, width = x.contiguous(), x.shape[-1] // 2
    result = torch.empty((*x.shape[:-1], width), dtype=dtype, device=x.device)
    count = result.numel() // max(width, 1)
    # A dynamic scale requires the whole row in one program.
    block = triton.next_power_of_2(width) if scales is not None else min(triton.next_power_of_2(width), 1024)
    tile_rows = max(1024 // block, 1)
    tensors = x, result, scale, offset, scales
    sizes = count, *clipping[:2], function.value, clipping[2], width, tile_rows, block
    _gated[triton.cdiv(count, tile_rows), triton.cdiv(width, block)](
        *tensors, *sizes, num_warps=warps(tile_rows * block)
    )
    return result
