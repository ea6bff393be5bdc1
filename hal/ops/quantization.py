"""Quantization of activations to int8."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hal.ops.declaration.dtypes import FLOATING
from hal.ops.declaration.operation import op
from hal.ops.declaration.samples import Draw, Sample

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
