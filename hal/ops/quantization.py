"""Eight-bit integers (W8A8): quantising activations, and projections of integers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hal.ops.declaration.dtypes import FLOATING
from hal.ops.declaration.operation import op
from hal.ops.declaration.samples import Draw, Sample

SHAPES = ((1, 64), (7, 96), (2, 3, 128), (0, 64))

NEAR_TIES = {torch.float32: 0.01, torch.bfloat16: 0.01, torch.float16: 0.01}
"""Share of values that lie so near the middle of two integers that one rounding of the quotient moves them."""
SCALES = {torch.float32: (1e-5, 1e-7), torch.bfloat16: (8e-3, 1e-7), torch.float16: (1e-3, 1e-7)}
"""Tolerance of scales, which are small: the usual absolute one would hide them."""


def quantizers(draw: Draw, width: int) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Scale and offset in each form that they may have."""
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
    """To int8 by a scale and an offset known beforehand: ``clamp(round(x / scale + offset), -128, 127)``.

    Computed in float32, and divided, not multiplied by a reciprocal; half rounds to even. What NaN becomes is not said.

    Args:
        x: ``[..., width]``, floating.
        scale: ``[1]``, or the same value ``[width]`` times, which is the form that fused kernels take without a
            launch more; float32, positive.
        offset: in the shape of scale, likewise one value; int32. None is 0, and costs nothing.

    Returns:
        int8, of x's shape.
    """
    scaled = x.float() / scale.float()
    if offset is not None:
        scaled = scaled + offset.float()
    return scaled.round().clamp(-128, 127).to(torch.int8)


def dynamic_samples(draw: Draw) -> Iterator[Sample]:
    """Activations to be quantised by a scale for each token."""
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
    """To int8 by a scale for each token, found from its values: ``round(x / scale)`` with ``scale = max|x| / 127``.

    Computed in float32; half rounds to even. A row of zeros gives zeros, and the scale 0. A row with NaN or an infinity
    has a scale that is not finite, so that it shows in what is computed from it.

    Args:
        x: ``[..., width]``, floating, of 2 dimensions or more.

    Returns:
        int8 of x's shape, and the scales, float32 ``[...]``.
    """
    wide = x.float()
    scale = wide.abs().amax(-1) / 127
    divisor = torch.where(scale == 0, 1.0, scale).unsqueeze(-1)
    return (wide / divisor).round().clamp(-128, 127).to(torch.int8), scale


def _projections(draw: Draw) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """x, weight, and a scale for each output."""
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
        "x": "... in_features", "weight": "out_features in_features", "deq_scale": "out_features",
        "quant_bias": "out_features", "return": "... out_features",
    },
    dtypes={
        "x": torch.int8, "weight": torch.int8, "deq_scale": torch.float32, "quant_bias": torch.int32,
        "return": "dtype",
    },
    rowwise="...",
    weights=("weight", "deq_scale"),
)  # fmt: skip
def quant_linear_static(
    x: Tensor, weight: Tensor, deq_scale: Tensor, quant_bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """``(x @ weight.T + quant_bias) * deq_scale``: a projection of what :func:`quantize` gave.

    Products and bias are summed in int32, exactly; the sum is converted to float32, multiplied, and rounded to dtype.
    Everything else is folded at load: ``deq_scale = x_scale * weight_scale``, and into the bias, a float one divided by
    deq_scale, and ``-offset * weight.sum(-1)``.

    Args:
        x: ``[..., in_features]``, int8.
        weight: ``[out_features, in_features]``, int8, in the layout that the driver prepared.
        deq_scale: ``[out_features]``, float32, or as :meth:`hal.Backend.prepare_weight` made it for dtype.
        quant_bias: ``[out_features]``, int32, or None.
        dtype: of the result, floating.

    Returns:
        ``[..., out_features]``, of dtype.
    """
    sums = accumulated(x, weight)
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
        "x": "... in_features", "x_scale": "...", "weight": "out_features in_features",
        "weight_scale": "out_features", "bias": "out_features", "return": "... out_features",
    },
    dtypes={
        "x": torch.int8, "x_scale": torch.float32, "weight": torch.int8, "weight_scale": torch.float32,
        "bias": (torch.float32, "dtype"), "return": "dtype",
    },
    rowwise="...",
    weights=("weight",),
)  # fmt: skip
def quant_linear_dynamic(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """``(x @ weight.T) * weight_scale * x_scale + bias``: a projection of what :func:`dynamic_quantize` gave.

    Products are summed in int32, exactly. The rest is in float32, in the order written, and rounded to dtype once.

    Args:
        x: ``[..., in_features]``, int8.
        x_scale: ``[...]``, float32.
        weight: ``[out_features, in_features]``, int8, in the layout that the driver prepared.
        weight_scale: ``[out_features]``, float32.
        bias: ``[out_features]``, float32 or of dtype, or None.
        dtype: of the result, floating.

    Returns:
        ``[..., out_features]``, of dtype.
    """
    values = accumulated(x, weight).float() * weight_scale * x_scale.unsqueeze(-1)
    if bias is not None:
        values = values + bias
    return values.to(dtype)


def accumulated(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T`` in int32. Few devices but the CPU multiply such matrices; float64 has exactly the same sums."""
    kind = torch.int32 if x.device.type == "cpu" else torch.float64
    return (x.to(kind) @ weight.to(kind).t()).to(torch.int32)
