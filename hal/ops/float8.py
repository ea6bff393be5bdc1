"""Projections with weights in float8, scaled by blocks, by rows or as a whole, and floating-point activations."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from hal.ops.declaration.dtypes import FLOATING
from hal.ops.declaration.operation import op
from hal.ops.declaration.samples import Draw, Sample

BLOCKS = "(out_features+block_rows-1)//block_rows (in_features+block_columns-1)//block_columns"


def float8_values(bits: Tensor) -> Tensor:
    """Return the numbers of the bits of float8 (e4m3), uint8, in float32."""
    return bits.view(torch.float8_e4m3fn).float()


def float8_bits(x: Tensor) -> Tensor:
    """Return the bits of float8 (e4m3), uint8, nearest to float32 numbers; those beyond 448 become 448."""
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


def widen(weight: Tensor, weight_scale: Tensor, block_rows: int, block_columns: int) -> Tensor:
    """Return ``weight * weight_scale`` with the scale of each block, float32; see :func:`fp8_linear`."""
    return scaled_by_block(float8_values(weight), weight_scale, block_rows, block_columns)


def scaled_by_block(numbers: Tensor, scale: Tensor, block_rows: int, block_columns: int) -> Tensor:
    """Return float32 numbers ``[..., rows, columns]`` times the scale of their block."""
    rows, columns = numbers.shape[-2:]
    if scale.shape[-2] > 1 and block_rows > 1:
        scale = scale.repeat_interleave(block_rows, -2)[..., :rows, :]
    if scale.shape[-1] > 1:
        scale = scale.repeat_interleave(block_columns, -1)[..., :columns]
    return numbers * scale


def block_shapes() -> Iterator[tuple[int, int, int, int]]:
    """Yield out_features, in_features, and the rows and columns of a block: whole and shorter ones, a row, and all."""
    yield 256, 128, 128, 128
    yield 96, 320, 64, 128
    yield 48, 64, 1, 64
    yield 40, 96, 40, 96


def scaled_blocks(draw: Draw, rows: int, columns: int, *shape: int) -> tuple[Tensor, Tensor]:
    """Return a weight ``[..., out_features, in_features]`` with the bits of float8, and its scales in float32."""
    blocks = -(-shape[-2] // rows), -(-shape[-1] // columns)
    values = draw.integers(-300, 300, *shape).float().cpu().to(torch.float8_e4m3fn).view(torch.uint8)
    return values.to(draw.device), draw.integers(50, 200, *shape[:-2], *blocks).float() * (4e-5 * shape[-1] ** -0.5)


def _fp8_samples(draw: Draw) -> Iterator[Sample]:
    for place, (out, width, rows, columns) in enumerate(block_shapes()):
        weight, scale = scaled_blocks(draw, rows, columns, out, width)
        x, bias = draw.normal((1, 17, 0, 5)[place], width), draw.normal(out)
        yield x, weight, scale, None, rows, columns
        yield x, weight, scale, bias.float() if place % 2 else bias, rows, columns
    yield x.view(1, *x.shape), weight, scale, bias, rows, columns


@op(
    samples=_fp8_samples,
    axes={
        "x": "... in_features",
        "weight": "out_features in_features",
        "weight_scale": BLOCKS,
        "bias": "out_features",
        "return": "... out_features",
    },
    dtypes={
        "x": FLOATING,
        "weight": torch.uint8,
        "weight_scale": torch.float32,
        "bias": (torch.float32, "x"),
        "return": "x",
    },
    rowwise="...",
    weights=("weight", "weight_scale", "bias"),
)
def fp8_linear(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, block_rows: int, block_columns: int
) -> Tensor:
    """Project with a weight in float8: ``x @ (weight * weight_scale).T + bias``, with a scale for each block.

    The element ``[row, column]`` of the weight has the scale ``[row // block_rows, column // block_columns]``. The last
    blocks may be smaller. Activations are not quantized. Accumulated in float32 and rounded to x's dtype once. A kernel
    may round the scaled weights to x's dtype, too.

    Args:
        x: ``[..., in_features]``, floating.
        weight: ``[out_features, in_features]``, uint8: the bits of float8_e4m3fn, which some devices cannot hold; or as
            :meth:`hal.Backend.prepare_weight` returned it.
        weight_scale: float32, a number for each block.
        bias: ``[out_features]``, float32 or of x's dtype, or None.
        block_rows: the rows of a block: 128 for blocks of 128 x 128, 1 for a scale of each row.
        block_columns: the columns of a block, at least ``in_features`` for a scale of each row.

    Returns:
        ``[..., out_features]``, of x's dtype.

    Source: DeepSeek-AI, *DeepSeek-V3 Technical Report*, 2024 (blocks of 128 x 128).
    """
    values = functional.linear(x.float(), widen(weight, weight_scale, block_rows, block_columns))
    if bias is not None:
        values = values + bias
    return values.to(x.dtype)
