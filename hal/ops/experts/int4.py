"""Mixtures of experts with int8 activations and int4 weights in groups: W4A8."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hal.ops.declaration.operation import op
from hal.ops.declaration.samples import Draw, Sample
from hal.ops.experts.grouped import grouped_linear, split_rows
from hal.ops.int4_projection import int8_rows, row_sums
from hal.ops.weight_only import GROUPS, SCALES, dequantize, group_shapes, quantized_groups


def _samples(draw: Draw) -> Iterator[Sample]:
    for place, (width, out, size) in enumerate((*group_shapes(), (512, 48, 256))):
        rows, experts = ((1, 3), (17, 8), (0, 2), (9, 4), (6, 2), (2, 5), (11, 3))[place]
        weight, scale, _ = quantized_groups(draw, 4, experts, out, width, group_size=size)
        x, x_scale = int8_rows(draw, rows, width)
        counts = split_rows(draw, rows, experts)
        yield x, x_scale, weight, scale, row_sums(weight, scale, size), counts, size, draw.dtype


@op(
    samples=_samples,
    axes={
        "x": "assignments in_features",
        "x_scale": "assignments",
        "weight": "num_experts out_features in_features//8",
        "weight_scale": f"num_experts out_features {GROUPS}",
        "row_sums": "num_experts out_features",
        "counts": "num_experts",
        "return": "assignments out_features",
    },
    dtypes={
        "x": torch.int8,
        "x_scale": torch.float32,
        "weight": torch.int32,
        "weight_scale": SCALES,
        "row_sums": torch.float32,
        "counts": torch.int64,
        "return": "dtype",
    },
    rowwise=None,
    weights=("weight", "weight_scale", "row_sums"),
    tolerance={torch.bfloat16: (1.6e-2, 1e-2)},
)
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
    """Project consecutive rows as :func:`quant_linear_int4` does, with one weight per expert.

    Args:
        x: ``[assignments, in_features]``, int8, sorted by expert.
        x_scale: ``[assignments]``, float32.
        weight: as in :func:`quant_linear_int4`, with a first dimension ``num_experts`` more.
        weight_scale: ``[num_experts, out_features, groups]``, floating, or as the driver prepared it.
        row_sums: ``[num_experts, out_features]``, float32, or as the driver prepared it.
        counts: as in :func:`grouped_linear`.
        group_size: the columns of a group.
        dtype: the dtype of the result, floating.

    Returns:
        ``[assignments, out_features]``, of dtype; rows beyond the counts are unspecified.
    """
    wide = dequantize(weight, weight_scale, None, group_size)
    return (grouped_linear(x.float(), wide, counts, None) * x_scale.unsqueeze(-1)).to(dtype)
