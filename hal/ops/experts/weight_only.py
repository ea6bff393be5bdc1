"""Mixtures of experts with weights of 8 or 4 bits in groups, and floating-point activations."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hal.ops.declaration.dtypes import FLOATING
from hal.ops.declaration.operation import op
from hal.ops.declaration.samples import Draw, Sample
from hal.ops.experts.grouped import BIAS, grouped_linear, split_rows
from hal.ops.weight_only import GROUPS, PACKED, SCALES, ZERO_POINTS, dequantize, group_shapes, quantized_groups


def _weight_only_samples(draw: Draw) -> Iterator[Sample]:
    for place, (width, out, size) in enumerate(group_shapes()):
        rows, experts = ((1, 3), (17, 8), (0, 2), (9, 4), (6, 2), (2, 5))[place]
        counts = split_rows(draw, rows, experts)
        for bits in (8, 4):
            weight, scale, zero = quantized_groups(draw, bits, experts, out, width, group_size=size)
            x, bias = draw.normal(rows, width), draw.normal(experts, out)
            yield x, weight, scale, None, counts, None, size
            yield x, weight, scale.to(torch.bfloat16), zero, counts, bias, size


@op(
    samples=_weight_only_samples,
    axes={
        "x": "assignments in_features",
        "weight": "num_experts out_features in_features|in_features//8",
        "weight_scale": f"num_experts out_features {GROUPS}",
        "weight_zero_point": f"num_experts out_features {GROUPS}",
        "counts": "num_experts",
        "bias": "num_experts out_features",
        "return": "assignments out_features",
    },
    dtypes={
        "x": FLOATING,
        "weight": PACKED,
        "weight_scale": SCALES,
        "weight_zero_point": ZERO_POINTS,
        "counts": torch.int64,
        "bias": BIAS,
        "return": "x",
    },
    rowwise=None,
    weights=("weight", "weight_scale", "weight_zero_point", "bias"),
    tolerance={torch.bfloat16: (1.6e-2, 1e-2)},
)
def weight_only_grouped_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor | None,
    counts: Tensor,
    bias: Tensor | None,
    group_size: int,
) -> Tensor:
    """Project consecutive rows as :func:`weight_only_linear` does, with one weight per expert.

    Args:
        x: ``[assignments, in_features]``, floating, sorted by expert.
        weight: as in :func:`weight_only_linear`, with a first dimension ``num_experts`` more.
        weight_scale: ``[num_experts, out_features, groups]``, floating, or as the driver prepared it.
        weight_zero_point: ``[num_experts, out_features, groups]``, int8 or float32, or as the driver prepared it; None
            for 0.
        counts: as in :func:`grouped_linear`.
        bias: as in :func:`grouped_linear`, or None.
        group_size: the columns of a group.

    Returns:
        ``[assignments, out_features]``, of x's dtype; rows beyond the counts are unspecified.
    """
    wide = dequantize(weight, weight_scale, weight_zero_point, group_size)
    return grouped_linear(x.float(), wide, counts, bias).to(x.dtype)
