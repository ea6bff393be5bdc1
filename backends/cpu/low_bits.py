"""Kernels of projections with weights of 8 or 4 bits, which widen some rows of a weight at a time, and of lookups.

A tape records each as one call, and gives it ``out``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from hal.ops import float8
from hal.ops.experts import mxfp4
from hal.ops.kernels import torch_kernels
from hal.ops.kernels.kernel_table import Kernel
from hal.ops.weight_only import dequantize

from .grouped import spans

WIDENED = 1 << 20
"""Elements of a weight that are widened at once."""

Rows = Callable[[int, int], Tensor]
"""Returns rows of a weight from a first one to an end, in float32 or in the dtype of x."""


class Widen(Protocol):
    """A function that widens rows of a weight, as :func:`widened` does."""

    def __call__(
        self,
        weight: Tensor,
        scale: Tensor,
        zero: Tensor | None,
        group_size: int,
        dtype: torch.dtype,
        start: int,
        end: int,
    ) -> Tensor:
        """Return the rows from ``start`` to ``end``, ``[end - start, in_features]``."""


def widened(
    weight: Tensor, scale: Tensor, zero: Tensor | None, group_size: int, dtype: torch.dtype, start: int, end: int
) -> Tensor:
    """Return scaled rows of a weight of 8 or 4 bits in a dtype."""
    if weight.dtype is torch.uint8:
        return mxfp4.widen(weight[start:end], scale[start:end]).to(dtype)
    zero = None if zero is None else zero[start:end]
    return dequantize(weight[start:end], scale[start:end], zero, group_size).to(dtype)


def weight_only_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor | None,
    bias: Tensor | None,
    group_size: int,
    *,
    out: Tensor | None = None,
    widen: Widen = widened,
) -> Tensor:
    """See :func:`hal.ops.weight_only_linear`. It rounds the scaled weights to x's dtype."""
    rows = partial(widen, weight, weight_scale, weight_zero_point, group_size, x.dtype)
    output = x.new_empty(*x.shape[:-1], weight.shape[0]) if out is None else out
    _project(x, rows, bias, output)
    return output


def weight_only_embedding(*arguments: Any, out: Tensor | None = None) -> Tensor:
    """See :func:`hal.ops.weight_only_embedding`."""
    rows = torch_kernels.KERNELS["weight_only_embedding"](*arguments)
    return rows if out is None else out.copy_(rows)


def weight_only_grouped_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor | None,
    counts: Tensor,
    bias: Tensor | None,
    group_size: int,
    *,
    out: Tensor | None = None,
    widen: Widen = widened,
    operation: str = "weight_only_grouped_linear",
) -> Tensor:
    """See :func:`hal.ops.weight_only_grouped_linear`. It rounds the scaled weights to x's dtype."""
    output = x.new_empty(x.shape[0], weight.shape[1]) if out is None else out
    for expert, start, end in spans(operation, counts, x.shape[0]):
        zero = None if weight_zero_point is None else weight_zero_point[expert]
        rows = partial(widen, weight[expert], weight_scale[expert], zero, group_size, x.dtype)
        _project(x[start:end], rows, None if bias is None else bias[expert], output[start:end])
    return output


def mxfp4_grouped_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    counts: Tensor,
    bias: Tensor | None,
    *,
    out: Tensor | None = None,
    widen: Widen = widened,
) -> Tensor:
    """See :func:`hal.ops.mxfp4_grouped_linear`. It rounds the scaled weights to x's dtype."""
    given = x, weight, weight_scale, None, counts, bias, mxfp4.GROUP
    return weight_only_grouped_linear(*given, out=out, widen=widen, operation="mxfp4_grouped_linear")


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    block_rows: int,
    block_columns: int,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """See :func:`hal.ops.fp8_linear`. It rounds the scaled weights to x's dtype."""
    output = x.new_empty(*x.shape[:-1], weight.shape[0]) if out is None else out
    _project(x, partial(_block_rows, weight, weight_scale, block_rows, block_columns), bias, output, block_rows)
    return output


def fp8_grouped_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    counts: Tensor,
    bias: Tensor | None,
    block_rows: int,
    block_columns: int,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """See :func:`hal.ops.fp8_grouped_linear`. It rounds the scaled weights to x's dtype."""
    output = x.new_empty(x.shape[0], weight.shape[1]) if out is None else out
    for expert, start, end in spans("fp8_grouped_linear", counts, x.shape[0]):
        rows = partial(_block_rows, weight[expert], weight_scale[expert], block_rows, block_columns)
        _project(x[start:end], rows, None if bias is None else bias[expert], output[start:end], block_rows)
    return output


def quant_linear_int4(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    row_sums: Tensor,
    bias: Tensor | None,
    group_size: int,
    dtype: torch.dtype,
    *,
    out: Tensor | None = None,
    product: Kernel = weight_only_linear,
) -> Tensor:
    """See :func:`hal.ops.quant_linear_int4`. The product is that of weights only, in float32."""
    values = product(x.float(), weight, weight_scale, None, None, group_size).mul_(x_scale.unsqueeze(-1))
    if bias is not None:
        values += bias
    return values.to(dtype) if out is None else out.copy_(values)


def quant_grouped_linear_int4(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    row_sums: Tensor,
    counts: Tensor,
    group_size: int,
    dtype: torch.dtype,
    *,
    out: Tensor | None = None,
    product: Kernel = weight_only_grouped_linear,
) -> Tensor:
    """See :func:`hal.ops.quant_grouped_linear_int4`. The product is that of weights only, in float32."""
    values = product(x.float(), weight, weight_scale, None, counts, None, group_size).mul_(x_scale.unsqueeze(-1))
    return values.to(dtype) if out is None else out.copy_(values)


def _block_rows(weight: Tensor, scale: Tensor, block_rows: int, block_columns: int, start: int, end: int) -> Tensor:
    scale = scale[start // block_rows : -(-end // block_rows)]
    return float8.widen(weight[start:end], scale, block_rows, block_columns)


def _project(x: Tensor, rows: Rows, bias: Tensor | None, output: Tensor, unit: int = 1) -> None:
    """Write ``x @ weight.T + bias``.

    Args:
        x: ``[..., in_features]``.
        rows: widens rows of the weight.
        bias: ``[out_features]``, or None.
        output: ``[..., out_features]``.
        unit: the rows that are widened together.
    """
    count = output.shape[-1]
    step = max(1, WIDENED // (unit * max(1, x.shape[-1]))) * unit
    for start in range(0, count, step):
        end = min(start + step, count)
        added = None if bias is None else bias[start:end].to(x.dtype)
        output[..., start:end] = functional.linear(x, rows(start, end).to(x.dtype), added)


KERNELS: dict[str, Kernel] = {
    "fp8_grouped_linear": fp8_grouped_linear,
    "fp8_linear": fp8_linear,
    "mxfp4_grouped_linear": mxfp4_grouped_linear,
    "quant_grouped_linear_int4": quant_grouped_linear_int4,
    "quant_linear_int4": quant_linear_int4,
    "weight_only_embedding": weight_only_embedding,
    "weight_only_grouped_linear": weight_only_grouped_linear,
    "weight_only_linear": weight_only_linear,
}
