"""Kernels of int8 activations with int4 weights, on the generations A2 and A3.

Sources: the documentation of CANN's ops-nn (aclnnQuantMatmulV5, K-C and K-G) and ops-transformer (aclnnGroupedMatmulV5,
A8W4), and vllm-ascend's of one scale per column of an expert. The operators subtract 8 from activations, so that their
offset or bias must be 8 times the sums of the scaled weights. They take weights ``[in_features, out_features / 8]``,
and scales of whole rows or of groups of 256.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch_npu
from torch import Tensor
from torch.nn import functional

from hal.ops.kernels.kernel_table import Kernel
from hal.ops.weight_only import INT4S, dequantize, pack_int4, unpack_int4

from .experts import COUNTS, grouped_linear

if TYPE_CHECKING:
    from hal.nn import WeightUse

GROUP = 256
"""The inputs of a group that the operators take."""
SHIFT = 8
"""What the operators subtract from activations."""
MOST_INPUTS = 29576
MOST_EXPERT_INPUTS = 18432


def kernels() -> dict[str, Kernel]:
    """Return the kernels, by operation."""
    return {"quant_grouped_linear_int4": quant_grouped_linear_int4, "quant_linear_int4": quant_linear_int4}


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
    """See :func:`hal.ops.quant_linear_int4`.

    One launch with prepared arguments and scales of whole rows or of groups of 256, and one more for a bias. Otherwise
    the weight is widened.
    """
    if x.dim() != 2:
        rows = x.flatten(0, -2)
        flat = quant_linear_int4(rows, x_scale.flatten(), weight, weight_scale, row_sums, bias, group_size, dtype)
        return flat.view(*x.shape[:-1], -1)
    if not x.shape[0]:
        return x.new_empty(0, row_sums.shape[0], dtype=dtype)
    if weight_scale.dtype == torch.int64 and _fits(x, weight_scale, group_size, MOST_INPUTS):
        features, groups = weight_scale.shape
        grouped = groups > 1
        values: Tensor = torch_npu.npu_quant_matmul(
            x,
            weight.view(x.shape[1], -1),
            weight_scale.view(groups, features) if grouped else weight_scale.view(-1),
            offset=row_sums,
            pertoken_scale=x_scale.unsqueeze(1) if grouped else x_scale,
            output_dtype=dtype,
            group_sizes=[0, 0, GROUP if grouped else 0],  # Without any, torch_npu traces groups only.
        )
    else:
        wide = _widened(weight, weight_scale, group_size, dtype)
        values = (functional.linear(x.to(dtype), wide) * x_scale.unsqueeze(-1)).to(dtype)
    return values if bias is None else values + bias.to(dtype)


def quant_grouped_linear_int4(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    row_sums: Tensor,
    counts: Tensor,
    group_size: int,
    dtype: torch.dtype,
) -> Tensor:
    """See :func:`hal.ops.quant_grouped_linear_int4`, and :func:`quant_linear_int4`."""
    if not x.shape[0]:
        return x.new_empty(0, row_sums.shape[1], dtype=dtype)
    if weight_scale.dtype != torch.int64 or not _fits(x, weight_scale, group_size, MOST_EXPERT_INPUTS):
        wide = _widened(weight, weight_scale, group_size, dtype)
        return (grouped_linear(x.to(dtype), wide, counts) * x_scale.unsqueeze(-1)).to(dtype)
    (output,) = torch_npu.npu_grouped_matmul(
        [x.contiguous()],
        [weight.view(weight.shape[0], x.shape[1], -1)],
        scale=[weight_scale.view(-1, weight_scale.shape[2], weight_scale.shape[1])],
        bias=[row_sums],
        per_token_scale=[x_scale],
        group_list=counts,
        split_item=3,
        group_type=0,
        group_list_type=COUNTS,
        output_dtype=dtype,
    )
    return output  # type: ignore[no-any-return]


def prepared(tensor: Tensor, use: WeightUse) -> Tensor:
    """Return a tensor of the operations as the kernels take it."""
    match use.argument:
        case "weight":
            return _prepared_weight(tensor)
        case "weight_scale":
            return _prepared_scale(tensor)
        case "row_sums":
            return tensor if tensor.shape[-1] % INT4S else tensor * SHIFT
    return tensor.to(use.dtype)


def _prepared_weight(weight: Tensor) -> Tensor:
    """Return a weight in the memory of ``[..., in_features, out_features / 8]``, in its own shape.

    A weight whose outputs do not fill int32 stays as it is. Experts are converted one after the other.
    """
    if weight.shape[-2] % INT4S:
        return weight
    if weight.dim() == 3:
        return torch.stack([_prepared_weight(each) for each in weight])
    return pack_int4(unpack_int4(weight).t()).view(weight.shape)


def _prepared_scale(scale: Tensor) -> Tensor:
    """Return scales as int64 in the memory of ``[..., groups, out_features]``, in their own shape.

    Those of a projection are packed by TransQuantParam, and those of experts are the bits of float32.
    """
    if scale.shape[-2] % INT4S:
        return scale
    columns = scale.float().transpose(-1, -2).contiguous()
    if scale.dim() == 3:
        return columns.view(torch.int32).to(torch.int64).view(scale.shape)
    packed: Tensor = torch_npu.npu_trans_quant_param(columns.flatten()).view(scale.shape)
    return packed


def _fits(x: Tensor, weight_scale: Tensor, group_size: int, most: int) -> bool:
    """Return whether the operators take prepared scales."""
    width, groups = x.shape[1], weight_scale.shape[-1]
    return width <= most and width % 2 == 0 and (groups == 1 or (group_size == GROUP and width % GROUP == 0))


def _widened(weight: Tensor, weight_scale: Tensor, group_size: int, dtype: torch.dtype) -> Tensor:
    """Return the scaled weights ``[..., out_features, in_features]`` in ``dtype``, of prepared or other tensors."""
    if weight_scale.dtype != torch.int64:
        return dequantize(weight, weight_scale, None, group_size).to(dtype)
    *experts, features, groups = weight_scale.shape
    # A float32 is in the low half of each scale.
    scale = weight_scale.view(*experts, groups, features).view(torch.int32)[..., ::2].contiguous().view(torch.float32)
    numbers = unpack_int4(weight.view(*experts, -1, features // INT4S))
    spread = scale.repeat_interleave(group_size, -2)[..., : numbers.shape[-2], :]
    return (numbers * spread).to(dtype).transpose(-1, -2)
