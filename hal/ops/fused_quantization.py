"""W8A8: quantization to int8 fused with the preceding norm or activation."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hal.ops.activation import silu_and_mul
from hal.ops.declaration.dtypes import FLOATING
from hal.ops.declaration.operation import fused_op
from hal.ops.declaration.samples import Draw, Sample
from hal.ops.norm import add_rms_norm
from hal.ops.quantization import SCALES, SHAPES, dynamic_quantize, dynamic_samples, quantize, quantizers

ROUNDED_BEFORE = {torch.float32: 0.01, torch.bfloat16: 0.15, torch.float16: 0.03}
"""Off-by-one shares for kernels that keep float32 where the reference rounds, which moves 127 by up to 0.25."""


def _add_norm_samples(draw: Draw) -> Iterator[tuple[Tensor, Tensor, Tensor, float]]:
    for shape in SHAPES:
        yield draw.normal(*shape), draw.normal(*shape), draw.normal(shape[-1]), 1e-6


def _add_norm_quantize_samples(draw: Draw) -> Iterator[Sample]:
    for arguments in _add_norm_samples(draw):
        for quantizer in quantizers(draw, arguments[2].shape[0]):
            yield *arguments, *quantizer


@fused_op(
    samples=_add_norm_quantize_samples,
    axes={
        "x": "... width",
        "residual": "... width",
        "weight": "width",
        "scale": "channels=1|width",
        "offset": "channels",
        "return": ("... width", "... width"),
    },
    dtypes={
        "x": FLOATING,
        "residual": "x",
        "weight": "x",
        "scale": torch.float32,
        "offset": torch.int32,
        "return": (torch.int8, "x"),
    },
    rowwise="...",
    off_by_one=ROUNDED_BEFORE,
)
def add_rms_norm_quantize(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: Tensor, offset: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Apply :func:`add_rms_norm`, then :func:`quantize` to the norm, which a kernel may keep in float32.

    Args:
        x: ``[..., width]``, floating.
        residual: of x's shape and dtype.
        weight: ``[width]``, of x's dtype.
        eps: added to the mean square.
        scale: as in :func:`quantize`.
        offset: as in :func:`quantize`.

    Returns:
        The quantized norm, int8, and the sum, of x's dtype, both of x's shape.
    """
    normed, hidden = add_rms_norm(x, residual, weight, eps)
    return quantize(normed, scale, offset), hidden


@fused_op(
    samples=_add_norm_samples,
    axes={"x": "... width", "residual": "... width", "weight": "width", "return": ("... width", "...", "... width")},
    dtypes={"x": FLOATING, "residual": "x", "weight": "x", "return": (torch.int8, torch.float32, "x")},
    rowwise="...",
    tolerance=SCALES,
    off_by_one=ROUNDED_BEFORE,
)
def add_rms_norm_dynamic_quantize(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply :func:`add_rms_norm`, then :func:`dynamic_quantize` to the norm, which a kernel may keep in float32.

    Args:
        x: ``[..., width]``, floating, of 2 or more dimensions.
        residual: of x's shape and dtype.
        weight: ``[width]``, of x's dtype.
        eps: added to the mean square.

    Returns:
        The quantized norm, int8 of x's shape; its scales, float32 ``[...]``; and the sum, of x's shape and dtype.
    """
    normed, hidden = add_rms_norm(x, residual, weight, eps)
    quantized, scale = dynamic_quantize(normed)
    return quantized, scale, hidden


def _silu_quantize_samples(draw: Draw) -> Iterator[Sample]:
    for shape in SHAPES:
        for quantizer in quantizers(draw, shape[-1] // 2):
            yield draw.normal(*shape), *quantizer


@fused_op(
    samples=_silu_quantize_samples,
    axes={"x": "... merged", "scale": "channels=1|merged//2", "offset": "channels", "return": "... merged//2"},
    dtypes={"x": FLOATING, "scale": torch.float32, "offset": torch.int32, "return": torch.int8},
    rowwise="...",
    off_by_one=ROUNDED_BEFORE,
)
def silu_and_mul_quantize(x: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
    """Apply :func:`silu_and_mul`, then :func:`quantize` to the product, which a kernel may keep in float32.

    Args:
        x: ``[..., 2 * width]``, floating.
        scale: as in :func:`quantize`.
        offset: as in :func:`quantize`.

    Returns:
        int8 ``[..., width]``.
    """
    return quantize(silu_and_mul(x), scale, offset)


@fused_op(
    samples=dynamic_samples,
    axes={"x": "... merged", "return": ("... merged//2", "...")},
    dtypes={"x": FLOATING, "return": (torch.int8, torch.float32)},
    rowwise="...",
    tolerance=SCALES,
    off_by_one=ROUNDED_BEFORE,
)
def silu_and_mul_dynamic_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Apply :func:`silu_and_mul`, then :func:`dynamic_quantize` to the product, which a kernel may keep in float32.

    Args:
        x: ``[..., 2 * width]``, floating, of 2 or more dimensions.

    Returns:
        int8 ``[..., width]``, and the scales, float32 ``[...]``.
    """
    return dynamic_quantize(silu_and_mul(x))
