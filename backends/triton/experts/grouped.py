"""Products of consecutive rows with one weight per expert.

A program computes a tile of one expert's rows. Programs past the last tile do nothing.
"""

from __future__ import annotations

import attrs
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..arguments import require, unit_stride
from ..interpreter import INTERPRETED, dot, rounded
from ..quantization import to_int8
from ..tiles import most_tiles, rows_of_tile


@triton.jit
def _multiply(total, x_at, weight_at, depth, in_features: tl.constexpr, exact: tl.constexpr):
    """Return ``total`` plus the product of two tiles; ``exact`` says that they end within ``in_features``."""
    if exact:
        x, weight = tl.load(x_at), tl.load(weight_at)
    else:
        inside = (depth < in_features)[None, :]
        x, weight = tl.load(x_at, mask=inside, other=0.0), tl.load(weight_at, mask=inside, other=0.0)
    return _accumulate(total, x, weight)


@triton.jit
def _accumulate(total, x, weight):
    if x.dtype == tl.int8:
        return tl.dot(x, tl.trans(weight), total, out_dtype=tl.int32)
    if weight.dtype == tl.int8 and not INTERPRETED:
        weight = weight.to(x.dtype)
    return total + dot(x, tl.trans(weight))


@triton.jit
def _scaled(total, at, inside, weight_scale, bias, row_scale):
    """Return float32 sums with their bias and scales; ``at`` are the weight's rows among those of all experts."""
    added = None
    if bias is not None:
        added = tl.load(bias + at, mask=inside, other=0)[None, :]
        if added.dtype == tl.int32 and total.dtype == tl.int32:  # in units of the scale
            total += added
            added = None
    values = total.to(tl.float32)
    if weight_scale is not None:
        values *= tl.load(weight_scale + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    if row_scale is not None:
        values *= row_scale[:, None]
    if added is not None:
        values += added.to(tl.float32)
    return values


@triton.jit
def _project(
    x,
    x_scale,
    tokens,
    weight,
    weight_scale,
    bias,
    counts,
    result,
    scale,
    offset,
    x_row,
    num_experts: tl.constexpr,
    in_features: tl.constexpr,
    out_features: tl.constexpr,
    gated: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
):
    """Write a tile of ``rows`` by ``columns``; if ``gated``, of ``silu(gate) * up``, each with ``out_features``."""
    features: tl.constexpr = out_features * 2 if gated else out_features
    exact: tl.constexpr = in_features % depth == 0
    expert, first, end = rows_of_tile(counts, tl.program_id(0), num_experts, rows)
    if expert >= num_experts:
        return
    row = first + tl.arange(0, rows)
    real = row < end
    # Rows past the end repeat the first, and are not stored.
    taken = tl.where(real, row, first)
    if tokens is not None:
        taken = tl.load(tokens + taken)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    inside = column < out_features
    own = expert.to(tl.int64) * features + tl.where(inside, column, 0)
    step = tl.arange(0, depth)
    x_at = x + taken.to(tl.int64)[:, None] * x_row + step[None, :]
    weight_at = weight + own[:, None] * in_features + step[None, :]
    kind: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32
    total = tl.zeros([rows, columns], kind)
    if gated:
        up = tl.zeros([rows, columns], kind)
    for done in range(0, in_features, depth):
        total = _multiply(total, x_at + done, weight_at + done, step + done, in_features, exact)
        if gated:
            up_at = weight_at + out_features * in_features
            up = _multiply(up, x_at + done, up_at + done, step + done, in_features, exact)

    row_scale = None
    if x_scale is not None:
        row_scale = tl.load(x_scale + taken)
    values = _scaled(total, own, inside, weight_scale, bias, row_scale)
    if gated:
        values = values / (1.0 + tl.exp(-values))
        values *= _scaled(up, own + out_features, inside, weight_scale, bias, row_scale)
    at = result + row.to(tl.int64)[:, None] * out_features + column[None, :]
    mask = real[:, None] & inside[None, :]
    if scale is None:
        tl.store(at, rounded(values, result.dtype.element_ty), mask=mask)
    else:
        shift = 0.0
        if offset is not None:
            shift = tl.load(offset).to(tl.float32)
        tl.store(at, to_int8(values, tl.load(scale), shift), mask=mask)


@attrs.frozen
class Tiles:
    """Tile sizes and launch parameters.

    Attributes:
        rows: rows per program; a power of two of at least 16, for the tensor cores.
        columns: outputs per program; of gate and of up each, if the product is gated.
        depth: inputs per iteration.
        warps: warps per program.
        stages: pipeline stages of loads.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def tiles(count: int, num_experts: int, gated: bool, itemsize: int) -> Tiles:
    """Return the tiles for given shapes.

    Args:
        count: rows of all experts.
        num_experts: the number of experts.
        gated: whether the product is gated.
        itemsize: bytes per element of the rows.
    """
    # The sizes have not been tuned on a GPU.
    average = count / max(num_experts, 1)
    if itemsize > 2:  # products without tensor cores, which take more registers
        return Tiles(16 if average <= 16 else 32, 32, 32, 4, 2)
    depth = 64 if itemsize == 2 else 128
    if average <= 16:
        return Tiles(16, 32 if gated else 64, 2 * depth, 4, 3)
    if average <= 64:
        return Tiles(64, 64 if gated else 128, depth, 4, 3)
    return Tiles(128, 64 if gated else 128, depth, 8, 3)


def project(
    x: Tensor,
    weight: Tensor,
    counts: Tensor,
    dtype: torch.dtype,
    *,
    tokens: Tensor | None = None,
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    bias: Tensor | None = None,
    gated: bool = False,
    quantizer: tuple[Tensor, Tensor | None] | None = None,
) -> Tensor:
    """Launch the product. Arguments must have been checked.

    Args:
        x: ``[rows, in_features]``, floating or int8.
        weight: ``[num_experts, out_features, in_features]``, of x's dtype or int8.
        counts: the number of rows of each expert, int64 ``[num_experts]``.
        dtype: the dtype of the result.
        tokens: the row of x for each row of the result, int32 ``[result rows]``; None if they are the same.
        x_scale: float32 ``[rows]``, which multiplies the rows.
        weight_scale: floating ``[num_experts, out_features, 1]``, which multiplies the sums.
        bias: ``[num_experts, out_features]``, added to the sums of int8 if it is int32, else to the result.
        gated: whether to return ``silu(gate) * up`` of the two halves of the outputs.
        quantizer: scale and offset as in :func:`hal.ops.quantize`, for an int8 result.

    Returns:
        ``[result rows, out_features]``, or half of the features if it is gated.
    """
    (num_experts, features, in_features), count = weight.shape, len(x if tokens is None else tokens)
    x, out_features = unit_stride(x), features // 2 if gated else features
    result = torch.empty((count, out_features), dtype=dtype, device=x.device)
    chosen = tiles(count, num_experts, gated, x.itemsize)
    scale, offset = quantizer or (None, None)
    tensors = (
        x,
        None if x_scale is None else x_scale.contiguous(),
        tokens,
        weight.contiguous(),
        None if weight_scale is None else weight_scale.contiguous(),
        None if bias is None else bias.contiguous(),
        counts.contiguous(),
        result,
        scale,
        offset,
    )
    sizes = x.stride(0), num_experts, in_features, out_features, gated, chosen.rows, chosen.columns, chosen.depth
    _project[most_tiles(count, num_experts, chosen.rows), triton.cdiv(out_features, chosen.columns)](
        *tensors, *sizes, num_warps=chosen.warps, num_stages=chosen.stages
    )
    return result


def require_bias(operation: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Check a floating-point bias.

    Raises:
        OperationError: it does not match the weight.
    """
    if bias is not None:
        fits = bias.shape == weight.shape[:2] and bias.dtype in (x.dtype, torch.float32)
        require(fits, operation, x, weight, bias)


def require_weight(operation: str, x: Tensor, weight: Tensor, counts: Tensor) -> None:
    """Check a product's rows, floating-point weight and counts.

    Raises:
        OperationError: they do not match, or the counts are not int64.
    """
    fits = x.dim() == 2 and weight.dim() == 3 and weight.shape[0] > 0 and weight.shape[2] == x.shape[1]
    fits = fits and counts.shape == weight.shape[:1] and counts.dtype is torch.int64 and weight.dtype is x.dtype
    require(fits, operation, x, weight, counts)
