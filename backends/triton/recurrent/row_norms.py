"""The norms and gates of recurrent layers, row by row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..arguments import require, rows, unit_stride, warps
from ..interpreter import rounded
from ..launching import launch


@triton.jit(do_not_specialize=["count"])
def _normalize(
    x,
    gate,
    weight,
    result,
    count,
    per_group,
    group_stride,
    row_stride,
    gate_group_stride,
    gate_row_stride,
    divisor,
    eps,
    width: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
):
    """Write ``x / sqrt(sum(x**2) / divisor + eps)``, times the weight and the gate's SiLU if they are given."""
    row = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
    column = tl.arange(0, block)
    mask = (row < count)[:, None] & (column < width)[None, :]
    group, own = row // per_group, row % per_group
    start = group * group_stride + own * row_stride
    values = tl.load(x + start[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    values *= tl.rsqrt(tl.sum(values * values, 1) / divisor + eps)[:, None]
    if weight is not None:
        values *= tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    if gate is not None:
        start = group * gate_group_stride + own * gate_row_stride
        gates = tl.load(gate + start[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
        values *= gates / (1.0 + tl.exp(-gates))
    tl.store(result + row[:, None] * width + column[None, :], rounded(values, result.dtype.element_ty), mask=mask)


def l2_norm(x: Tensor, eps: float) -> Tensor:
    """See :func:`hal.ops.l2_norm`. It reads heads in a packed projection in place."""
    require(x.dim() > 0, "l2_norm", x)
    return _launch("l2_norm", x, None, None, 1.0, eps)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See :func:`hal.ops.gated_rms_norm`. It reads gates in a packed projection in place."""
    fits = gate.shape == x.shape and gate.dtype is x.dtype and weight.shape == x.shape[-1:]
    require(fits and weight.dtype in (x.dtype, torch.float32), "gated_rms_norm", x, gate, weight)
    return _launch("gated_rms_norm", x, gate, unit_stride(weight), float(x.shape[-1]), eps)


def _launch(
    operation: str, x: Tensor, gate: Tensor | None, weight: Tensor | None, divisor: float, eps: float
) -> Tensor:
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x, per_group, group_stride, row_stride = rows(x)
    gate_group_stride, gate_row_stride = 0, 0
    if gate is not None:
        gate, _, gate_group_stride, gate_row_stride = rows(gate)
    width = x.shape[-1]
    count, block = x.numel() // max(width, 1), triton.next_power_of_2(width)
    tile_rows = max(1024 // block, 1)
    tensors = x, gate, weight, result
    sizes = count, per_group, group_stride, row_stride, gate_group_stride, gate_row_stride, divisor, eps, width
    given, grid = (*tensors, *sizes, tile_rows, block), (triton.cdiv(count, tile_rows),)
    launch(operation, _normalize, grid, *given, written=[result], num_warps=warps(tile_rows * block))
    return result


@triton.jit(do_not_specialize=["count"])
def _gates(a, b, factor, dt_bias, decay, rate, count, a_row, b_row, heads: tl.constexpr, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    mask = at < count
    token, head = at // heads, at % heads
    shifted = tl.load(a + token * a_row + head, mask=mask, other=0.0).to(tl.float32)
    shifted += tl.load(dt_bias + head, mask=mask, other=0.0)
    # softplus: the logarithm of 1 plus a small number by its series.
    small = tl.exp(-tl.abs(shifted))
    logarithm = tl.where(small < 1e-3, small * (1.0 - small * (0.5 - small / 3.0)), tl.log(1.0 + small))
    softplus = tl.maximum(shifted, 0.0) + logarithm
    tl.store(decay + at, tl.load(factor + head, mask=mask, other=0.0) * softplus, mask=mask)
    values = tl.load(b + token * b_row + head, mask=mask, other=0.0).to(tl.float32)
    tl.store(rate + at, rounded(1.0 / (1.0 + tl.exp(-values)), rate.dtype.element_ty), mask=mask)


def delta_rule_gates(a: Tensor, b: Tensor, factor: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`hal.ops.delta_rule_gates`. It reads both parts of a projection in place."""
    fits = a.dim() == 2 and b.shape == a.shape and b.dtype is a.dtype and factor.shape == dt_bias.shape == a.shape[1:]
    fits = fits and factor.dtype is dt_bias.dtype is torch.float32
    require(fits, "delta_rule_gates", a, b, factor, dt_bias)
    decay = torch.empty(a.shape, dtype=torch.float32, device=a.device)
    rate = torch.empty(a.shape, dtype=b.dtype, device=a.device)
    a, b = unit_stride(a), unit_stride(b)
    tensors = a, b, factor.contiguous(), dt_bias.contiguous(), decay, rate
    sizes = a.numel(), a.stride(0), b.stride(0), a.shape[1], 256
    _gates[(triton.cdiv(a.numel(), 256),)](*tensors, *sizes, num_warps=2)
    return decay, rate
