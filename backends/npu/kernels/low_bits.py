"""Kernels of weights of 8 and 4 bits in groups, of float8 and of float4.

Sources: the documentation of torch_npu and of CANN's ops-nn and ops-transformer. npu_weight_quant_batchmatmul adds its
offset to the numbers before it scales them. npu_grouped_matmul takes scales of groups for int4 weights without offsets
only. Neither takes float8 or float4 on the generations A2 and A3, so that each step widens them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch_npu
from torch import Tensor
from torch.nn import functional

from hal.ops.experts.mxfp4 import GROUP, exponent_values, float4_values
from hal.ops.float8 import scaled_by_block
from hal.ops.kernels.kernel_table import Kernel
from hal.ops.weight_only import INT4S, dequantize

from ..soc import LEAST_GROUP
from .experts import grouped_linear, grouped_matmul
from .experts import prepared_bias as prepared_expert_bias
from .quantized import prepared_int8_bias


def kernels(device: torch.device, *, experts: bool) -> dict[str, Kernel]:
    """Return the kernels, by operation.

    Args:
        device: the device.
        experts: whether it has the operators of experts.
    """
    float8 = Float8(device)
    found: dict[str, Kernel] = {
        "fp8_linear": float8.linear,
        "weight_only_embedding": weight_only_embedding,
        "weight_only_linear": weight_only_linear,
    }
    if experts:
        found |= {
            "fp8_grouped_linear": float8.grouped_linear,
            "mxfp4_grouped_linear": Float4(device).grouped_linear,
            "weight_only_grouped_linear": weight_only_grouped_linear,
        }
    return found


def weight_only_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor | None,
    bias: Tensor | None,
    group_size: int,
) -> Tensor:
    """See :func:`hal.ops.weight_only_linear`. One launch with prepared arguments, unless a group is of another size."""
    if x.dim() != 2:
        rows = x.flatten(0, -2)
        flat = weight_only_linear(rows, weight, weight_scale, weight_zero_point, bias, group_size)
        return flat.view(*x.shape[:-1], -1)
    if not x.shape[0]:
        return x.new_empty(0, weight.shape[0])
    added = None if bias is None else prepared_int8_bias(bias, x.dtype)
    if weight_scale.shape[1] > 1 and group_size % LEAST_GROUP:
        wide = _dequantized(x.dtype, weight, weight_scale, weight_zero_point, group_size)
        return functional.linear(x, wide, None if added is None else added.to(x.dtype))
    offset = None if weight_zero_point is None else prepared_zero_point(weight_zero_point, x.dtype).t()
    return torch_npu.npu_weight_quant_batchmatmul(  # type: ignore[no-any-return]
        x,
        weight.t(),
        weight_scale.to(x.dtype).t(),
        antiquant_offset=offset,
        bias=added,
        antiquant_group_size=group_size if weight_scale.shape[1] > 1 else 0,
    )


def weight_only_embedding(
    token_ids: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor | None,
    width: int,
    group_size: int,
    dtype: torch.dtype,
) -> Tensor:
    """See :func:`hal.ops.weight_only_embedding`. It gathers the rows, and widens them as a projection's weight."""
    zero = None if weight_zero_point is None else weight_zero_point.index_select(0, token_ids)
    rows, scale = weight.index_select(0, token_ids), weight_scale.index_select(0, token_ids)
    return _dequantized(dtype, rows, scale, zero, group_size)


def weight_only_grouped_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor | None,
    counts: Tensor,
    bias: Tensor | None,
    group_size: int,
) -> Tensor:
    """See :func:`hal.ops.weight_only_grouped_linear`.

    One launch for int4 groups without zero points, if they are equal, and with one group per row. Otherwise the weights
    are widened first.
    """
    if not x.shape[0]:
        return x.new_empty(0, weight.shape[1])
    int4, groups = weight.dtype == torch.int32, weight_scale.shape[2]
    width = weight.shape[2] * (INT4S if int4 else 1)
    if groups > 1 and not (int4 and weight_zero_point is None and width % group_size == 0):
        wide = _dequantized(x.dtype, weight, weight_scale, weight_zero_point, group_size)
        return grouped_linear(x, wide, counts, bias)
    scale = weight_scale.to(x.dtype)
    options: dict[str, Any] = {} if bias is None else {"bias": [prepared_expert_bias(bias, x.dtype)]}
    if groups > 1:
        scale = scale.transpose(1, 2)
    else:
        scale = scale.squeeze(-1)
        offset = None if weight_zero_point is None else prepared_zero_point(weight_zero_point, x.dtype).squeeze(-1)
        if offset is not None or not int4:
            options["antiquant_offset"] = [torch.zeros_like(scale) if offset is None else offset]
    return grouped_matmul(x, weight, counts, antiquant_scale=[scale], **options)


class Float8:
    """Kernels of float8 weights, which look up the numbers.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().to(device)

    def linear(
        self,
        x: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
        block_rows: int,
        block_columns: int,
    ) -> Tensor:
        """See :func:`hal.ops.fp8_linear`."""
        wide = self._widened(x, weight, weight_scale, block_rows, block_columns)
        return functional.linear(x, wide, None if bias is None else bias.to(x.dtype))

    def grouped_linear(
        self,
        x: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        counts: Tensor,
        bias: Tensor | None,
        block_rows: int,
        block_columns: int,
    ) -> Tensor:
        """See :func:`hal.ops.fp8_grouped_linear`."""
        wide = self._widened(x, weight, weight_scale, block_rows, block_columns)
        return grouped_linear(x, wide, counts, bias)

    def _widened(self, x: Tensor, weight: Tensor, weight_scale: Tensor, block_rows: int, block_columns: int) -> Tensor:
        numbers = self._numbers[weight.int()]
        return scaled_by_block(numbers, weight_scale, block_rows, block_columns).to(x.dtype)


class Float4:
    """The kernel of float4 weights, which looks up two numbers at once.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        pairs = float4_values(torch.arange(256, dtype=torch.uint8).unsqueeze(-1))
        self._pairs = {dtype: pairs.to(dtype).to(device) for dtype in (torch.bfloat16, torch.float16, torch.float32)}

    def grouped_linear(
        self, x: Tensor, weight: Tensor, weight_scale: Tensor, counts: Tensor, bias: Tensor | None
    ) -> Tensor:
        """See :func:`hal.ops.mxfp4_grouped_linear`. It rounds the scales, and the scaled weights, to x's dtype."""
        if not x.shape[0]:
            return x.new_empty(0, weight.shape[1])
        scale = prepared_exponents(weight_scale, x.dtype).unsqueeze(-1)
        numbers = self._pairs[x.dtype][weight.int()].view(*weight_scale.shape, GROUP)
        return grouped_linear(x, (numbers * scale).flatten(-2), counts, bias)


def prepared_exponents(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the powers of two that exponents mean, in ``dtype``, which a prepared scale has already."""
    if scale.dtype == dtype:
        return scale
    powers = exponent_values(torch.arange(256, dtype=torch.uint8)).to(dtype)
    return powers.to(scale.device)[scale.int()]


def prepared_zero_point(zero_point: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what is added to weights before they are scaled, in ``dtype``, which a prepared zero point has already."""
    return zero_point if zero_point.dtype == dtype else (-zero_point.float()).to(dtype)


def _dequantized(
    dtype: torch.dtype, weight: Tensor, weight_scale: Tensor, weight_zero_point: Tensor | None, group_size: int
) -> Tensor:
    """Return weights in a dtype."""
    zero = weight_zero_point
    if zero is not None and zero.dtype == dtype:  # prepared
        zero = -zero
    return dequantize(weight, weight_scale, zero, group_size).to(dtype)
