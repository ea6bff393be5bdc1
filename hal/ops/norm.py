"""Normalization."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from hal.ops.declaration.constraints import Draw, Sample
from hal.ops.declaration.dtypes import FLOATING
from hal.ops.declaration.operation import fused_op, op


def _rms_norm_samples(draw: Draw) -> Iterator[Sample]:
    for shape in ((1, 64), (7, 96), (3, 4, 128), (0, 64)):
        yield draw.normal(*shape), draw.normal(shape[-1]), 1e-6
    yield draw.normal(5, 192)[:, 64:128], draw.normal(64), 1e-5  # rows that are not contiguous
    yield draw.normal(2, 64, scale=1e-4), draw.normal(64), 1e-6  # epsilon matters
    yield draw.normal(64, 3).t(), draw.normal(128)[::2], 1e-6  # no unit stride
    for shape in ((3, 64), (2, 5, 96)):
        yield draw.normal(*shape), draw.normal(shape[-1]).float(), 1e-6


WEIGHT = ("x", torch.float32)
"""The dtypes of the weight of a norm: float32 for one that is not rounded, such as ``1 + weight`` of a checkpoint."""


@op(
    samples=_rms_norm_samples,
    axes={"x": "... width", "weight": "width", "return": "... width"},
    dtypes={"x": FLOATING, "weight": WEIGHT, "return": "x"},
    rowwise="...",
)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the root-mean-square norm over the last dimension: ``x / sqrt(mean(x**2) + eps) * weight``.

    Computed in float32, and rounded to x's dtype once.

    Args:
        x: ``[..., width]``, floating.
        weight: ``[width]``, of x's dtype or float32.
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
    for shape in ((1, 64), (2, 3, 128)):
        yield draw.normal(*shape), draw.normal(*shape), draw.normal(shape[-1]).float(), 1e-6


@fused_op(
    samples=_add_rms_norm_samples,
    axes={"x": "... width", "residual": "... width", "weight": "width", "return": ("... width", "... width")},
    dtypes={"x": FLOATING, "residual": "x", "weight": WEIGHT, "return": ("x", "x")},
    rowwise="...",
)
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add a residual, then apply :func:`rms_norm`. The sum is rounded to x's dtype before the norm.

    Args:
        x: ``[..., width]``, floating.
        residual: of x's shape and dtype.
        weight: ``[width]``, of x's dtype or float32.
        eps: added to the mean square.

    Returns:
        The norm of the sum, and the sum, both of x's shape and dtype.
    """
    hidden = x + residual
    return rms_norm(hidden, weight, eps), hidden


def _layer_norm_samples(draw: Draw) -> Iterator[Sample]:
    for shape in ((1, 64), (7, 96), (3, 4, 128), (0, 64)):
        for bias in (None, draw.normal(shape[-1])):
            yield draw.normal(*shape), draw.normal(shape[-1]), bias, 1e-5
    yield draw.normal(5, 192)[:, 64:128], draw.normal(64), draw.normal(64), 1e-5  # rows that are not contiguous
    # Epsilon and the mean matter; a larger mean would lose the digits of the difference in float32.
    yield draw.normal(2, 64, scale=1e-2) + 0.25, draw.normal(64), None, 1e-5


@op(
    samples=_layer_norm_samples,
    axes={"x": "... width", "weight": "width", "bias": "width", "return": "... width"},
    dtypes={"x": FLOATING, "weight": "x", "bias": "x", "return": "x"},
    rowwise="...",
)
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Return the layer norm over the last dimension: ``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias``.

    Computed in float32, and rounded to x's dtype once.

    Args:
        x: ``[..., width]``, floating.
        weight: ``[width]``, of x's dtype.
        bias: as ``weight``, or None.
        eps: added to the variance.

    Returns:
        A tensor of x's shape and dtype.

    Source: Ba et al., *Layer Normalization*, 2016.
    """
    wide = functional.layer_norm(x.float(), weight.shape, weight.float(), None if bias is None else bias.float(), eps)
    return wide.to(x.dtype)


def _l2_norm_samples(draw: Draw) -> Iterator[Sample]:
    for shape in ((1, 64), (7, 96), (3, 4, 128), (0, 64)):
        yield draw.normal(*shape), 1e-6
    yield draw.normal(5, 192)[:, 64:128].unflatten(1, (2, 32)), 1e-6  # heads that are not contiguous
    yield draw.normal(2, 64, scale=1e-4), 1e-6  # epsilon matters


@op(
    samples=_l2_norm_samples,
    axes={"x": "... width", "return": "... width"},
    dtypes={"x": FLOATING, "return": "x"},
    rowwise="...",
)
def l2_norm(x: Tensor, eps: float) -> Tensor:
    """Return ``x / sqrt(sum(x**2) + eps)`` over the last dimension. Computed in float32, and rounded once.

    Args:
        x: ``[..., width]``, floating.
        eps: added to the sum of squares.

    Returns:
        A tensor of x's shape and dtype.
    """
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def _gated_rms_norm_samples(draw: Draw) -> Iterator[Sample]:
    for shape in ((1, 64), (7, 96), (3, 4, 128), (0, 64)):
        yield draw.normal(*shape), draw.normal(*shape), draw.normal(shape[-1]), 1e-6
    gate = draw.normal(5, 192)[:, 64:128].unflatten(1, (2, 32))  # heads that are not contiguous
    yield draw.normal(5, 2, 32), gate, draw.normal(32).float(), 1e-5
    yield draw.normal(2, 64, scale=1e-4), draw.normal(2, 64, scale=30.0), draw.normal(64), 1e-6


@op(
    samples=_gated_rms_norm_samples,
    axes={"x": "... width", "gate": "... width", "weight": "width", "return": "... width"},
    dtypes={"x": FLOATING, "gate": "x", "weight": WEIGHT, "return": "x"},
    rowwise="...",
)
def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``rms_norm(x) * silu(gate)``: the norm comes before the gate. Computed in float32, and rounded once.

    Args:
        x: ``[..., width]``, floating.
        gate: of x's shape and dtype.
        weight: ``[width]``, of x's dtype or float32.
        eps: added to the mean square.

    Returns:
        A tensor of x's shape and dtype.

    Source: Yang et al., *Gated Delta Networks: Improving Mamba2 with Delta Rule*, 2024.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float() * functional.silu(gate.float())).to(x.dtype)
