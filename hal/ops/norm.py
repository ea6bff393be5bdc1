"""Normalization."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hal.ops.declaration.dtypes import FLOATING
from hal.ops.declaration.operation import fused_op, op
from hal.ops.declaration.samples import Draw, Sample


def _rms_norm_samples(draw: Draw) -> Iterator[Sample]:
    for shape in ((1, 64), (7, 96), (3, 4, 128), (0, 64)):
        yield draw.normal(*shape), draw.normal(shape[-1]), 1e-6
    yield draw.normal(5, 192)[:, 64:128], draw.normal(64), 1e-5  # rows that are not contiguous
    yield draw.normal(2, 64, scale=1e-4), draw.normal(64), 1e-6  # epsilon matters
    yield draw.normal(64, 3).t(), draw.normal(128)[::2], 1e-6  # no unit stride


@op(
    samples=_rms_norm_samples,
    axes={"x": "... width", "weight": "width", "return": "... width"},
    dtypes={"x": FLOATING, "weight": "x", "return": "x"},
    rowwise="...",
)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the root-mean-square norm over the last dimension: ``x / sqrt(mean(x**2) + eps) * weight``.

    Computed in float32, and rounded to x's dtype once.

    Args:
        x: ``[..., width]``, floating.
        weight: ``[width]``, of x's dtype.
        eps: added to the mean square.

    Returns:
        A tensor of x's shape and dtype.

    Source: Zhang and Sennrich, *Root Mean Square Layer Normalization*, 2019.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def _add_rms_norm_samples(draw: Draw) -> Iterator[Sample]:
    for shape in ((1, 64), (7, 96), (2, 3, 128)):
        yield draw.normal(*shape), draw.normal(*shape), draw.normal(shape[-1]), 1e-6


@fused_op(
    samples=_add_rms_norm_samples,
    axes={"x": "... width", "residual": "... width", "weight": "width", "return": ("... width", "... width")},
    dtypes={"x": FLOATING, "residual": "x", "weight": "x", "return": ("x", "x")},
    rowwise="...",
)
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add a residual, then apply :func:`rms_norm`. The sum is rounded to x's dtype before the norm.

    Args:
        x: ``[..., width]``, floating.
        residual: of x's shape and dtype.
        weight: ``[width]``, of x's dtype.
        eps: added to the mean square.

    Returns:
        The norm of the sum, and the sum, both of x's shape and dtype.
    """
    hidden = x + residual
    return rms_norm(hidden, weight, eps), hidden
