"""Mixtures of experts with weights in float8 and floating-point activations."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hal.ops.declaration.dtypes import FLOATING
from hal.ops.declaration.operation import op
from hal.ops.declaration.samples import Draw, Sample
from hal.ops.experts.grouped import BIAS, grouped_linear, split_rows
from hal.ops.float8 import BLOCKS, block_shapes, scaled_blocks, widen


def _fp8_samples(draw: Draw) -> Iterator[Sample]:
    for place, (out, width, rows, columns) in enumerate(block_shapes()):
        tokens, experts = ((1, 3), (17, 2), (0, 2), (9, 4))[place]
        weight, scale = scaled_blocks(draw, rows, columns, experts, out, width)
        bias = draw.normal(experts, out) if place % 2 else None
        yield draw.normal(tokens, width), weight, scale, split_rows(draw, tokens, experts), bias, rows, columns


@op(
    samples=_fp8_samples,
    axes={
        "x": "assignments in_features",
        "weight": "num_experts out_features in_features",
        "weight_scale": f"num_experts {BLOCKS}",
        "counts": "num_experts",
        "bias": "num_experts out_features",
        "return": "assignments out_features",
    },
    dtypes={
        "x": FLOATING,
        "weight": torch.uint8,
        "weight_scale": torch.float32,
        "counts": torch.int64,
        "bias": BIAS,
        "return": "x",
    },
    rowwise=None,
    weights=("weight", "weight_scale", "bias"),
    tolerance={torch.bfloat16: (1.6e-2, 1e-2)},
)
def fp8_grouped_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    counts: Tensor,
    bias: Tensor | None,
    block_rows: int,
    block_columns: int,
) -> Tensor:
    """Project consecutive rows as :func:`fp8_linear` does, with one weight per expert.

    Args:
        x: ``[assignments, in_features]``, floating, sorted by expert.
        weight: ``[num_experts, out_features, in_features]``, uint8: the bits of float8_e4m3fn; or as the
            driver prepared it.
        weight_scale: float32, a number for each block of each expert.
        counts: as in :func:`grouped_linear`.
        bias: as in :func:`grouped_linear`, or None.
        block_rows: the rows of a block.
        block_columns: the columns of a block.

    Returns:
        ``[assignments, out_features]``, of x's dtype; rows beyond the counts are unspecified.
    """
    wide = widen(weight, weight_scale, block_rows, block_columns)
    return grouped_linear(x.float(), wide, counts, bias).to(x.dtype)
