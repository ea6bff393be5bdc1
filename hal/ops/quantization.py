"""Rounding of activations to float8, and quantization to int8, alone or fused with the preceding norm or activation."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hal.ops.activation import silu_and_mul
from hal.ops.declaration.constraints import Draw, Sample
from hal.ops.declaration.dtypes import FLOATING
from hal.ops.declaration.operation import fused_op, op
from hal.ops.forms import float8_bits, float8_values
from hal.ops.norm import add_rms_norm

SHAPES = ((1, 64), (7, 96), (2, 3, 128), (0, 64))

NEAR_TIES = {torch.float32: 0.01, torch.bfloat16: 0.01, torch.float16: 0.01}
"""Share of values so close to the midpoint of two integers that rounding the quotient differently moves them."""
SCALES = {torch.float32: (1e-5, 1e-7), torch.bfloat16: (8e-3, 1e-7), torch.float16: (1e-3, 1e-7)}
"""Tolerance of scales, which are too small for the default absolute tolerance."""


def quantizers(draw: Draw, width: int) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield each valid form of scale and offset."""
    for count in (1, width):
        scale = draw.tensor([0.0234375], torch.float32).expand(count).contiguous()
        offset = draw.tensor([-7], torch.int32).expand(count).contiguous()
        yield scale, None
        yield scale, offset


def _quantize_samples(draw: Draw) -> Iterator[Sample]:
    for shape in SHAPES:
        for quantizer in quantizers(draw, shape[-1]):
            yield draw.normal(*shape), *quantizer
    halves = draw.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 300.0, -300.0], draw.dtype)  # ties, and out of range
    yield halves, draw.tensor([1.0], torch.float32), None
    yield draw.normal(5, 192)[:, 64:128], draw.tensor([0.03125], torch.float32), None  # rows that are not contiguous


@op(
    samples=_quantize_samples,
    axes={"x": "[...] width", "scale": "channels=1|width", "offset": "channels", "return": "[...] width"},
    dtypes={"x": FLOATING, "scale": torch.float32, "offset": torch.int32, "return": torch.int8},
    rowwise="...",
    off_by_one=NEAR_TIES,
)
def quantize(x: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
    """Quantize to int8 with a given scale and offset: ``clamp(round(x / scale + offset), -128, 127)``.

    Computed in float32 by division, not by a reciprocal; half rounds to even. The result of NaN is undefined.

    Args:
        x: ``[..., width]``, floating.
        scale: float32, positive: ``[1]``, or ``[width]`` with the same value repeated, the form that fused kernels take
            without another launch.
        offset: int32, of scale's shape, one value; None means 0, at no cost.

    Returns:
        int8, of x's shape.
    """
    scaled = x.float() / scale.float()
    if offset is not None:
        scaled = scaled + offset.float()
    return scaled.round().clamp(-128, 127).to(torch.int8)


def dynamic_samples(draw: Draw) -> Iterator[Sample]:
    """Yield activations to quantize with a scale per token."""
    for shape in SHAPES:
        yield (draw.normal(*shape),)
    yield (draw.normal(5, 192)[:, 64:128],)
    yield (draw.tensor([[0.0] * 32, [1.0, -3.0] * 16], draw.dtype),)  # a row of zeros
    yield (draw.normal(3, 64, scale=50.0),)


@op(
    samples=dynamic_samples,
    axes={"x": "... width", "return": ("... width", "...")},
    dtypes={"x": FLOATING, "return": (torch.int8, torch.float32)},
    rowwise="...",
    tolerance=SCALES,
    off_by_one=NEAR_TIES,
)
def dynamic_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize to int8 with a scale per token: ``round(x / scale)`` with ``scale = max|x| / 127``.

    Computed in float32; half rounds to even. A row of zeros returns zeros and the scale 0. A row with NaN or infinity
    has a non-finite scale, so that results computed from it are not finite either.

    Args:
        x: ``[..., width]``, floating, of 2 or more dimensions.

    Returns:
        int8 of x's shape, and the scales, float32 ``[...]``.
    """
    wide = x.float()
    scale = wide.abs().amax(-1) / 127
    divisor = torch.where(scale == 0, 1.0, scale).unsqueeze(-1)
    return (wide / divisor).round().clamp(-128, 127).to(torch.int8), scale


def _float8_samples(draw: Draw) -> Iterator[Sample]:
    yield from ((*each, None) for each in dynamic_samples(draw))
    yield draw.normal(5, 64), draw.tensor([1 / 128], torch.float32)  # some numbers are beyond 448 times the scale


@op(
    samples=_float8_samples,
    axes={"x": "... width", "scale": "1", "return": ("... width", "...")},
    dtypes={"x": FLOATING, "scale": torch.float32, "return": ("x", torch.float32)},
    rowwise="...",
    tolerance=dict.fromkeys(SCALES, (0.13, 0.001)),
)
def float8_quantize(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Round to float8 (e4m3): ``round(x / scale)``, with a scale per token ``max|x| / 448`` if none is given.

    Computed in float32; half rounds to even. Each number of float8 is exact in x's dtype. A row of zeros returns zeros
    and the scale 0. A row with NaN or infinity has a non-finite scale. Numbers beyond 448 times a given scale become
    that; the result of NaN is then undefined.

    Args:
        x: ``[..., width]``, floating, of 2 or more dimensions.
        scale: that of all tokens, float32 ``[1]``, positive; or None.

    Returns:
        numbers of float8, of x's shape and dtype, and the scales, float32 ``[...]``.
    """
    wide = x.float()
    scale = wide.abs().amax(-1) / 448 if scale is None else scale.expand(x.shape[:-1]).contiguous()
    divisor = torch.where(scale == 0, 1.0, scale).unsqueeze(-1)
    return float8_values(float8_bits(wide / divisor)).to(x.dtype), scale


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
