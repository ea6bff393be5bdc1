"""Quantization of activations to int8, and projections with int8 weights: W8A8, and weights only."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

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


def _projections(draw: Draw) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield x, a weight, and a scale per output."""
    for tokens, width, out in ((1, 64, 96), (17, 128, 64), (0, 32, 16), (3, 2080, 48)):
        x = draw.integers(-128, 128, tokens, width, dtype=torch.int8)
        weight = draw.integers(-127, 128, out, width, dtype=torch.int8)
        scale = draw.integers(50, 200, out, dtype=torch.int64).float() * 1e-6
        yield x, weight, scale


def _static_linear_samples(draw: Draw) -> Iterator[Sample]:
    for x, weight, scale in _projections(draw):
        bias = draw.integers(-(2**20), 2**20, weight.shape[0], dtype=torch.int32)
        yield x, weight, scale, None, draw.dtype
        yield x, weight, scale, bias, draw.dtype
    yield x.view(1, *x.shape), weight, scale, bias, draw.dtype


@op(
    samples=_static_linear_samples,
    axes={
        "x": "... in_features",
        "weight": "out_features in_features",
        "deq_scale": "out_features",
        "quant_bias": "out_features",
        "return": "... out_features",
    },
    dtypes={
        "x": torch.int8,
        "weight": torch.int8,
        "deq_scale": torch.float32,
        "quant_bias": torch.int32,
        "return": "dtype",
    },
    rowwise="...",
    weights=("weight", "deq_scale"),
)
def quant_linear_static(
    x: Tensor, weight: Tensor, deq_scale: Tensor, quant_bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Project the result of :func:`quantize`: ``(x @ weight.T + quant_bias) * deq_scale``.

    Products and bias are summed exactly, in int32. The sum is converted to float32, multiplied, and rounded to dtype.
    The rest is folded at load: ``deq_scale = x_scale * weight_scale``, and the bias includes a floating-point bias
    divided by deq_scale, and ``-offset * weight.sum(-1)``.

    Args:
        x: ``[..., in_features]``, int8.
        weight: ``[out_features, in_features]``, int8, in the layout that the driver prepared.
        deq_scale: ``[out_features]``, float32, or as :meth:`hal.Backend.prepare_weight` returned it for dtype.
        quant_bias: ``[out_features]``, int32, or None.
        dtype: the dtype of the result, floating.

    Returns:
        ``[..., out_features]``, of dtype.
    """
    sums = int8_matmul(x, weight)
    if quant_bias is not None:
        sums = sums + quant_bias
    return (sums.float() * deq_scale).to(dtype)


def _dynamic_linear_samples(draw: Draw) -> Iterator[Sample]:
    for x, weight, scale in _projections(draw):
        x_scale = draw.integers(50, 200, x.shape[0], dtype=torch.int64).float() * 1e-2
        bias = draw.normal(weight.shape[0])
        yield x, x_scale, weight, scale, None, draw.dtype
        yield x, x_scale, weight, scale, bias, draw.dtype
        yield x, x_scale, weight, scale, bias.float(), draw.dtype
    yield x.view(1, *x.shape), x_scale.view(1, -1), weight, scale, None, draw.dtype


@op(
    samples=_dynamic_linear_samples,
    axes={
        "x": "... in_features",
        "x_scale": "...",
        "weight": "out_features in_features",
        "weight_scale": "out_features",
        "bias": "out_features",
        "return": "... out_features",
    },
    dtypes={
        "x": torch.int8,
        "x_scale": torch.float32,
        "weight": torch.int8,
        "weight_scale": torch.float32,
        "bias": (torch.float32, "dtype"),
        "return": "dtype",
    },
    rowwise="...",
    weights=("weight",),
)
def quant_linear_dynamic(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Project the result of :func:`dynamic_quantize`: ``(x @ weight.T) * weight_scale * x_scale + bias``.

    Products are summed exactly, in int32. The rest is computed in float32, in this order, and rounded to dtype once.

    Args:
        x: ``[..., in_features]``, int8.
        x_scale: ``[...]``, float32.
        weight: ``[out_features, in_features]``, int8, in the layout that the driver prepared.
        weight_scale: ``[out_features]``, float32.
        bias: ``[out_features]``, float32 or of dtype, or None.
        dtype: the dtype of the result, floating.

    Returns:
        ``[..., out_features]``, of dtype.
    """
    values = int8_matmul(x, weight).float() * weight_scale * x_scale.unsqueeze(-1)
    if bias is not None:
        values = values + bias
    return values.to(dtype)


def _weight_only_samples(draw: Draw) -> Iterator[Sample]:
    for x, weight, scale in _projections(draw):
        values, scale, bias = draw.normal(*x.shape), scale * 1e2 * x.shape[1] ** -0.5, draw.normal(weight.shape[0])
        yield values, weight, scale, None
        yield values, weight, scale, bias
        yield values, weight, scale, bias.float()
    yield values.view(1, *values.shape), weight, scale, None
    odd = draw.integers(-127, 128, 40, 24, dtype=torch.int8)  # no multiple of a vector register
    scale = draw.integers(50, 200, 40, dtype=torch.int64).float() * 1e-4 * 24**-0.5
    yield draw.normal(3, 24), odd, scale, None


@op(
    samples=_weight_only_samples,
    axes={
        "x": "... in_features",
        "weight": "out_features in_features",
        "weight_scale": "out_features",
        "bias": "out_features",
        "return": "... out_features",
    },
    dtypes={
        "x": FLOATING,
        "weight": torch.int8,
        "weight_scale": (torch.float32, "x"),
        "bias": (torch.float32, "x"),
        "return": "x",
    },
    rowwise="...",
    weights=("weight", "weight_scale", "bias"),
)
def linear_int8(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    """Project with an int8 weight and floating activations: ``x @ (weight * weight_scale).T + bias``.

    Accumulated in float32 and rounded to x's dtype. A kernel may round the scales or the scaled weights to x's dtype,
    too.

    Args:
        x: ``[..., in_features]``, floating.
        weight: ``[out_features, in_features]``, int8, in the layout that the driver prepared.
        weight_scale: ``[out_features]``, float32, or as :meth:`hal.Backend.prepare_weight` returned it for x's dtype.
        bias: ``[out_features]``, float32 or of x's dtype, or None.

    Returns:
        ``[..., out_features]``, of x's dtype.
    """
    values = functional.linear(x.float(), weight.float() * weight_scale.float().unsqueeze(-1))
    if bias is not None:
        values = values + bias
    return values.to(x.dtype)


def int8_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x @ weight.T`` in int32. Devices other than the CPU compute it exactly in float64."""
    kind = torch.int32 if x.device.type == "cpu" else torch.float64
    return (x.to(kind) @ weight.to(kind).t()).to(torch.int32)
