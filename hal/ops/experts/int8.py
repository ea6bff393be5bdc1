"""Mixtures of experts with int8 weights and floating-point activations."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hal.ops.declaration.dtypes import FLOATING
from hal.ops.declaration.operation import op
from hal.ops.declaration.samples import Draw, Sample
from hal.ops.experts.grouped import grouped_linear
from hal.ops.experts.quantized import quantized_projections


def _weight_only_samples(draw: Draw) -> Iterator[Sample]:
    for x, weight, scale, counts in quantized_projections(draw):
        yield draw.normal(*x.shape), weight, scale, counts


@op(
    samples=_weight_only_samples,
    axes={
        "x": "assignments in_features",
        "weight": "num_experts out_features in_features",
        "weight_scale": "num_experts out_features",
        "counts": "num_experts",
        "return": "assignments out_features",
    },
    dtypes={
        "x": FLOATING,
        "weight": torch.int8,
        "weight_scale": (torch.float32, "x"),
        "counts": torch.int64,
        "return": "x",
    },
    rowwise=None,
    weights=("weight", "weight_scale"),
    tolerance={torch.bfloat16: (1.6e-2, 1e-2)},
)
def grouped_linear_int8(x: Tensor, weight: Tensor, weight_scale: Tensor, counts: Tensor) -> Tensor:
    """Project consecutive rows with one int8 weight per expert: ``x[rows of e] @ (weight[e] * weight_scale[e]).T``.

    Accumulated in float32 and rounded to x's dtype. A kernel may round the scaled weights to x's dtype, too.

    Args:
        x: ``[assignments, in_features]``, floating, sorted by expert.
        weight: ``[num_experts, out_features, in_features]``, int8, in the layout that the driver prepared.
        weight_scale: ``[num_experts, out_features]``, float32, or as :meth:`hal.Backend.prepare_weight` returned it.
        counts: as in :func:`grouped_linear`.

    Returns:
        ``[assignments, out_features]``, of x's dtype; rows beyond the counts are unspecified.
    """
    wide = weight.float() * weight_scale.float().unsqueeze(-1)
    return grouped_linear(x.float(), wide, counts).to(x.dtype)
