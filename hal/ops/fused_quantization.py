"""Eight-bit integers (W8A8): quantisation fused with the norm or activation before it."""

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
"""The same where a kernel keeps float32 and the reference rounds to the dtype: a value of 127 by up to a quarter."""


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
        "x": "... width", "residual": "... width", "weight": "width", "scale": "channels=1|width",
        "offset": "channels", "return": ("... width", "... width"),
    },
    dtypes={
        "x": FLOATING, "residual": "x", "weight": "x", "scale": torch.float32, "offset": torch.int32,
        "return": (torch.int8, "x"),
    },
    rowwise="...",
    off_by_one=ROUNDED_BEFORE,
)  # fmt: skip
def add_rms_norm_quantize(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: Tensor, offset: Tensor | None
) -> tuple[Tensor, Tensor]:
    """:func:`add_rms_norm`, then :func:`quantize` of what it normalised. A kernel may leave that in float32 between.

    Args:
        x: ``[..., width]``, floating.
        residual: of x's shape and dtype.
        weight: ``[width]``, of x's dtype.
        eps: added to the mean square.
        scale: as of :func:`quantize`.
        offset: as of :func:`quantize`.

    Returns:
        The quantised norm, int8, and the sum, of x's dtype, both of x's shape.
    """
    normed, hidden = add_rms_norm(x, residual, weight, eps)
    return quantize(normed, scale, offset), hidden


@fused_op(
    samples=_add_norm_samples,
    axes={
        "x": "... width", "residual": "... width", "weight": "width", "return": ("... width", "...", "... width"),
    },
    dtypes={"x": FLOATING, "residual": "x", "weight": "x", "return": (torch.int8, torch.float32, "x")},
    rowwise="...",
    tolerance=SCALES,
    off_by_one=ROUNDED_BEFORE,
)  # fmt: skip
def add_rms_norm_dynamic_quantize(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`add_rms_norm`, then :func:`dynamic_quantize` of what it normalised, which may stay in float32 between.

    Args:
        x: ``[..., width]``, floating, of 2 dimensions or more.
        residual: of x's shape and dtype.
        weight: ``[width]``, of x's dtype.
        eps: added to the mean square.

    Returns:
        The quantised norm, int8 of x's shape, its scales, float32 ``[...]``, and the sum, of x's shape and dtype.
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
    axes={
        "x": "... merged", "scale": "channels=1|merged//2", "offset": "channels", "return": "... merged//2",
    },
    dtypes={"x": FLOATING, "scale": torch.float32, "offset": torch.int32, "return": torch.int8},
    rowwise="...",
    off_by_one=ROUNDED_BEFORE,
)  # fmt: skip
def silu_and_mul_quantize(x: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
    """:func:`silu_and_mul`, then :func:`quantize`. A kernel may leave the product in float32 between the two.

    Args:
        x: ``[..., 2 * width]``, floating.
        scale: as of :func:`quantize`.
        offset: as of :func:`quantize`.

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
    """:func:`silu_and_mul`, then :func:`dynamic_quantize`. A kernel may leave the product in float32 between the two.

    Args:
        x: ``[..., 2 * width]``, floating, of 2 dimensions or more.

    Returns:
        int8 ``[..., width]``, and the scales, float32 ``[...]``.
    """
    return dynamic_quantize(silu_and_mul(x))
