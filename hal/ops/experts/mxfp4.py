"""Mixtures of experts with weights in MXFP4 and floating-point activations."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hal.ops.declaration.dtypes import FLOATING
from hal.ops.declaration.operation import op
from hal.ops.declaration.samples import Draw, Sample
from hal.ops.experts.grouped import BIAS, grouped_linear, split_rows
from hal.ops.float8 import float8_values

GROUP = 32
"""The columns that share a scale."""
FLOAT4S = 2
"""The 4-bit numbers in a uint8."""


def float4_values(packed: Tensor) -> Tensor:
    """Return the numbers of float4 (e2m1) in uint8 ``[..., width]``, float32 ``[..., width * 2]``.

    The lowest four bits are the first number.
    """
    bits = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    # The same exponent and mantissa in float8 (e4m3), whose bias is larger by 6.
    return float8_values((bits & 7) << 2 | (bits & 8) << 4) * 64


def exponent_values(exponents: Tensor) -> Tensor:
    """Return the powers of two of e8m0, uint8: 2 to their power - 127, float32."""
    return exponents.view(torch.float8_e8m0fnu).float()


def widen(weight: Tensor, weight_scale: Tensor) -> Tensor:
    """Return ``weight * weight_scale``, float32 ``[..., in_features]``; see :func:`mxfp4_grouped_linear`.

    A floating-point scale, as a driver may prepare it, is the power of two.
    """
    numbers: Tensor = float4_values(weight).unflatten(-1, (-1, GROUP))
    scale = weight_scale.float() if weight_scale.is_floating_point() else exponent_values(weight_scale)
    return (numbers * scale.unsqueeze(-1)).flatten(-2)


def float4_groups(draw: Draw, *shape: int) -> tuple[Tensor, Tensor]:
    """Return a weight ``[..., out_features, in_features]`` with the bits of float4, and its exponents."""
    *rows, width = shape
    scale = draw.integers(120, 124, *rows, width // GROUP, dtype=torch.uint8)
    return draw.integers(0, 256, *rows, width // FLOAT4S, dtype=torch.uint8), scale


def _samples(draw: Draw) -> Iterator[Sample]:
    for rows, experts, out, width in (
        (1, 3, 40, 32),
        (17, 2, 96, 64),
        (0, 2, 24, 96),
        (9, 4, 33, 192),
        (40, 2, 16, 256),
    ):
        weight, scale = float4_groups(draw, experts, out, width)
        x, counts = draw.normal(rows, width), split_rows(draw, rows, experts)
        yield x, weight, scale, counts, None
        yield x, weight, scale, counts, draw.normal(experts, out)


@op(
    samples=_samples,
    axes={
        "x": "assignments in_features",
        "weight": "num_experts out_features in_features//2",
        "weight_scale": "num_experts out_features in_features//32",
        "counts": "num_experts",
        "bias": "num_experts out_features",
        "return": "assignments out_features",
    },
    dtypes={
        "x": FLOATING,
        "weight": torch.uint8,
        "weight_scale": torch.uint8,
        "counts": torch.int64,
        "bias": BIAS,
        "return": "x",
    },
    rowwise=None,
    weights=("weight", "weight_scale", "bias"),
    tolerance={torch.bfloat16: (1.6e-2, 1e-2)},
)
def mxfp4_grouped_linear(
    x: Tensor, weight: Tensor, weight_scale: Tensor, counts: Tensor, bias: Tensor | None
) -> Tensor:
    """Project consecutive rows with weights in MXFP4: ``x @ (weight * weight_scale).T + bias`` of their expert.

    Each 32 consecutive columns of a row share a scale, a power of two. Accumulated in float32 and rounded to x's dtype
    once. A kernel may round the scales, and the scaled weights, to x's dtype, which is exact in bfloat16 for all but
    the smallest ones.

    Args:
        x: ``[assignments, in_features]``, floating, sorted by expert. ``in_features`` is a multiple of 32.
        weight: ``[num_experts, out_features, in_features / 2]``, uint8: two numbers of float4 (e2m1), the first one in
            the lowest four bits; or as :meth:`hal.Backend.prepare_weight` returned it.
        weight_scale: ``[num_experts, out_features, in_features / 32]``, uint8: the bits of float8_e8m0fnu, which mean 2
            to their power - 127; or as the driver prepared it.
        counts: as in :func:`grouped_linear`.
        bias: as in :func:`grouped_linear`, or None.

    Returns:
        ``[assignments, out_features]``, of x's dtype; rows beyond the counts are unspecified.

    Source: Open Compute Project, *OCP Microscaling Formats (MX) Specification*, version 1.0, 2023.
    """
    return grouped_linear(x.float(), widen(weight, weight_scale), counts, bias).to(x.dtype)
