"""Projections of int8 activations with int4 weights in groups: W4A8."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from hal.ops.declaration.operation import op
from hal.ops.declaration.samples import Draw, Sample
from hal.ops.weight_only import GROUPS, INT4S, SCALES, dequantize, group_shapes, quantized_groups

WIDENED = 1 << 20
"""Numbers that :func:`row_sums` widens at once."""


def row_sums(weight: Tensor, weight_scale: Tensor, group_size: int) -> Tensor:
    """Return the sums of the rows of a scaled int4 weight, float32 ``[..., out_features]``. Widens some rows at a time.

    For the arguments, see :func:`quant_linear_int4`.
    """
    count = max(1, WIDENED // max(1, weight.shape[-1] * INT4S))
    rows = zip(weight.flatten(0, -2).split(count), weight_scale.flatten(0, -2).split(count), strict=True)
    sums = [dequantize(numbers, scale, None, group_size).sum(-1) for numbers, scale in rows]
    return torch.cat(sums).view(weight.shape[:-1])


def int8_rows(draw: Draw, rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Return activations and their scales, as :func:`dynamic_quantize` does."""
    scale = draw.integers(50, 200, rows, dtype=torch.int64).float() * 1e-4
    return draw.integers(-127, 128, rows, width, dtype=torch.int8), scale


def _samples(draw: Draw) -> Iterator[Sample]:
    for place, (width, out, size) in enumerate((*group_shapes(), (512, 48, 256))):
        weight, scale, _ = quantized_groups(draw, 4, out, width, group_size=size)
        x, x_scale = int8_rows(draw, (1, 17, 0, 3, 5, 2, 9)[place], width)
        sums, bias = row_sums(weight, scale, size), draw.normal(out)
        yield x, x_scale, weight, scale, sums, None, size, draw.dtype
        yield x, x_scale, weight, scale, sums, bias.float() if place % 2 else bias, size, draw.dtype
    yield x.view(1, *x.shape), x_scale.view(1, -1), weight, scale, sums, None, size, draw.dtype


@op(
    samples=_samples,
    axes={
        "x": "... in_features",
        "x_scale": "...",
        "weight": "out_features in_features//8",
        "weight_scale": f"out_features {GROUPS}",
        "row_sums": "out_features",
        "bias": "out_features",
        "return": "... out_features",
    },
    dtypes={
        "x": torch.int8,
        "x_scale": torch.float32,
        "weight": torch.int32,
        "weight_scale": SCALES,
        "row_sums": torch.float32,
        "bias": (torch.float32, "dtype"),
        "return": "dtype",
    },
    rowwise="...",
    weights=("weight", "weight_scale", "row_sums", "bias"),
)
def quant_linear_int4(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    row_sums: Tensor,
    bias: Tensor | None,
    group_size: int,
    dtype: torch.dtype,
) -> Tensor:
    """Project the result of :func:`dynamic_quantize`: ``(x @ (weight * weight_scale).T) * x_scale + bias``.

    Accumulated in float32, multiplied and added in this order, and rounded to dtype once. A kernel may sum the products
    of a group exactly. It may also round scales, scaled weights and the product to dtype, or scales to 10 bits after
    the leading one.

    Args:
        x: ``[..., in_features]``, int8.
        x_scale: ``[...]``, float32.
        weight: int32 ``[out_features, in_features / 8]``: 4-bit numbers, as in :func:`weight_only_linear`; or as
            :meth:`hal.Backend.prepare_weight` returned it.
        weight_scale: ``[out_features, groups]``, floating, or as the driver prepared it.
        row_sums: ``[out_features]``, float32: the sums of the rows of the scaled weight; or as the driver prepared it.
            Kernels that add a constant to x subtract it with these sums. Others ignore them.
        bias: ``[out_features]``, float32 or of dtype, or as the driver prepared it; or None.
        group_size: the columns of a group. A whole row is one group if it is at least ``in_features``.
        dtype: the dtype of the result, floating.

    Returns:
        ``[..., out_features]``, of dtype.
    """
    wide = dequantize(weight, weight_scale, None, group_size)
    values = functional.linear(x.float(), wide) * x_scale.unsqueeze(-1)
    if bias is not None:
        values = values + bias
    return values.to(dtype)
