"""The operations: which of the kernels, or of torch's functions, takes which arguments."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from hal.ops.kernels import torch_kernels
from hal.ops.weight_only import dequantize

from ..arguments import require
from .product import project, tiles
from .unpack import FLOAT8, IN_ONE, INT4, INT8
from .widen import widen

MANY = 64
"""The most rows that multiply packed weights. For more, a launch widens the weight and torch multiplies."""
INT8S = 128
"""What int8 numbers are at most."""


def _run(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    bias: Tensor | None,
    kind: int,
    block: tuple[int, int],
) -> Tensor:
    """Launch the product, or for many rows, widen the weight and let torch multiply."""
    count = x.numel() // max(x.shape[-1], 1)
    if count <= MANY:
        chosen = tiles(count, x.itemsize, kind, len(weight))
        return project(x, weight, scale, zero_point, bias, kind, block, chosen)
    wide = widen(weight, scale, zero_point, kind, block, x.dtype)
    return functional.linear(x, wide, None if bias is None else bias.to(x.dtype))


def columns_of_block(size: int, blocks: int, in_features: int) -> int | None:
    """Return the columns of a block as the kernel takes them, a power of two; None if they are none."""
    if blocks == 1:
        return max(16, 1 << (in_features - 1).bit_length())
    return size if size >= 16 and size & (size - 1) == 0 else None


def weight_only_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor | None,
    bias: Tensor | None,
    group_size: int,
) -> Tensor:
    """See :func:`hal.ops.weight_only_linear`. Torch widens weights whose group size is no power of two."""
    out_features, width = weight.shape
    kind = INT4 if weight.dtype is torch.int32 else INT8
    width = width * 8 if kind == INT4 else width
    groups = -(-width // group_size)
    fits = x.shape[-1] == width and weight.dtype in (torch.int8, torch.int32)
    fits = fits and weight_scale.shape == (out_features, groups)
    fits = fits and (weight_zero_point is None or weight_zero_point.shape == weight_scale.shape)
    fits = fits and (bias is None or bias.shape == (out_features,))
    given = [each for each in (weight_zero_point, bias) if each is not None]
    require(fits, "weight_only_linear", x, weight, weight_scale, *given)
    columns = columns_of_block(group_size, groups, width)
    if columns is None:
        return torch_kernels.weight_only_linear(x, weight, weight_scale, weight_zero_point, bias, group_size)
    return _run(x, weight, weight_scale, weight_zero_point, bias, kind, (1, columns))


def quant_linear_int4(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    row_sums: Tensor,
    bias: Tensor | None,
    group_size: int,
    dtype: torch.dtype,
) -> Tensor:
    """See :func:`hal.ops.quant_linear_int4`. Numbers of int8 and int4 are exact in each dtype; scaled weights of groups
    are rounded to it, and of many rows the product."""
    (out_features, words), groups = weight.shape, weight_scale.shape[-1]
    width = words * IN_ONE[INT4]
    fits = x.shape[-1] == width and x.dtype is torch.int8 and weight.dtype is torch.int32
    fits = fits and x_scale.shape == x.shape[:-1] and x_scale.dtype is torch.float32
    fits = fits and weight_scale.shape == (out_features, -(-width // group_size))
    fits = fits and (bias is None or bias.shape == (out_features,))
    require(fits, "quant_linear_int4", x_scale, x, weight, weight_scale, *([] if bias is None else [bias]))
    columns = columns_of_block(group_size, groups, width)
    count = x.numel() // max(width, 1)
    if columns is not None and count <= MANY:
        chosen, block = tiles(count, dtype.itemsize, INT4, out_features), (1, columns)
        return project(x, weight, weight_scale, None, bias, INT4, block, chosen, x_scale=x_scale, dtype=dtype)
    if columns is None:
        wide = dequantize(weight, weight_scale, None, group_size).to(dtype)
    else:
        wide = widen(weight, weight_scale, None, INT4, (1, columns), dtype)
    # A power of two keeps numbers exact, and the product within float16.
    product = functional.linear(x.to(dtype) / INT8S, wide) * (x_scale * INT8S).unsqueeze(-1)
    return (product if bias is None else product + bias).to(dtype)


def fp8_linear(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, block_rows: int, block_columns: int
) -> Tensor:
    """See :func:`hal.ops.fp8_linear`. Torch widens weights whose blocks have a width that is no power of two."""
    out_features, width = weight.shape
    shape = -(-out_features // block_rows), -(-width // block_columns)
    fits = x.shape[-1] == width and weight.dtype is torch.uint8 and weight_scale.shape == shape
    fits = fits and weight_scale.dtype is torch.float32 and (bias is None or bias.shape == (out_features,))
    require(fits, "fp8_linear", x, weight, weight_scale, *([] if bias is None else [bias]))
    columns = columns_of_block(block_columns, shape[1], width)
    if columns is None:
        return torch_kernels.fp8_linear(x, weight, weight_scale, bias, block_rows, block_columns)
    return _run(x, weight, weight_scale, None, bias, FLOAT8, (block_rows, columns))


def linear_int8(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    """See :func:`hal.ops.linear_int8`. A row of the weight is one group."""
    out_features, width = weight.shape
    fits = x.shape[-1] == width and weight.dtype is torch.int8 and weight_scale.shape == (out_features,)
    fits = fits and (bias is None or bias.shape == (out_features,))
    require(fits, "linear_int8", x, weight, weight_scale, *([] if bias is None else [bias]))
    columns = columns_of_block(width, 1, width)
    assert columns is not None
    return _run(x, weight, weight_scale.unsqueeze(-1), None, bias, INT8, (1, columns))
