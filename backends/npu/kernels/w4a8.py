"""Kernels of int8 inputs with int4 weights, on the generations A2 and A3.

Sources: the documentation of CANN's ops-nn (aclnnQuantMatmulV5, K-C and K-G) and ops-transformer (aclnnGroupedMatmulV5,
A8W4), and vllm-ascend's of one scale per column of an expert. The operators subtract 8 from inputs, so that their
offset or bias must be 8 times the sums of the scaled weights. They take weights ``[in_features, out_features / 8]``,
and scales of whole rows or of groups of 256.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch_npu
from torch import Tensor

from hal.ops.forms import INT4S, Form, dequantize, pack_int4, unpack_int4

from .experts import COUNTS, add_bias
from .low_bits import LowBits
from .quantized import packed, rounded

if TYPE_CHECKING:
    from hal.nn import WeightUse

GROUP = 256
"""The inputs of a group that the operators take."""
SHIFT = 8
"""What the operators subtract from inputs."""
MOST_INPUTS = {"linear": 29576, "grouped_linear": 18432}
WIDENED = 1 << 20
"""The numbers that are widened at once to sum them."""


def takes(form: Form) -> bool:
    """Return whether the operators take weights of a form, if their sizes fit."""
    return form.numbers == "int4" and form.inputs == "int8" and form.rows == 1 and not form.zero_points


class Int8ByInt4:
    """One launch with prepared weights, whose scales are int64, and more for a bias; ``low`` widens other weights."""

    def __init__(self, low: LowBits) -> None:
        self._low = low

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        """See :func:`hal.ops.linear`. The zero point is the offset that :meth:`prepared` computed."""
        weight_scale, offset, x_scale, dtype, _ = rest
        if weight_scale.dtype is not torch.int64:
            return self._low.widened_linear(x, weight, bias, *rest)
        features, groups = weight_scale.shape
        grouped = groups > 1
        values: Tensor = torch_npu.npu_quant_matmul(
            x,
            weight.view(x.shape[1], -1),
            weight_scale.view(groups, features) if grouped else weight_scale.view(-1),
            offset=offset.view(-1),
            pertoken_scale=x_scale.unsqueeze(1) if grouped else x_scale,
            output_dtype=dtype,
            group_sizes=[0, 0, GROUP if grouped else 0],  # Without any, torch_npu traces groups only.
        )
        return values if bias is None else values + bias

    def grouped_linear(self, x: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        """See :func:`hal.ops.grouped_linear`, and :meth:`linear`."""
        weight_scale, offset, x_scale, dtype, _ = rest
        if weight_scale.dtype is not torch.int64:
            return self._low.widened_grouped_linear(x, weight, counts, bias, *rest)
        experts, features, groups = weight_scale.shape
        (values,) = torch_npu.npu_grouped_matmul(
            [x.contiguous()],
            [weight.view(experts, x.shape[1], -1)],
            scale=[weight_scale.view(experts, groups, features)],
            bias=[offset.squeeze(-1)],
            per_token_scale=[x_scale],
            group_list=counts,
            split_item=3,
            group_type=0,
            group_list_type=COUNTS,
            output_dtype=dtype,
        )
        return values if bias is None else add_bias(values, bias, counts)

    def prepared(self, weights: Mapping[str, Tensor], use: WeightUse) -> Mapping[str, Tensor]:
        """Return weights in the memory of the operators, in their own shapes, with the operators' offset.

        Weights whose sizes do not fit stay as they are, to be widened. Scales of a projection are packed, and those of
        experts are the bits of float32 in int64.
        """
        found = dict(self._low.prepared_to_widen(weights, use))
        weight, scale = weights["weight"], found["weight_scale"].float()
        if not _fits(use.form, weight, MOST_INPUTS[use.operation]):
            return found
        experts = weight.dim() == 3
        scale = scale if experts else rounded(scale)
        columns = scale.mT.contiguous()
        found["weight_scale"] = columns.view(torch.int32).to(torch.int64) if experts else packed(columns)
        found["weight_scale"] = found["weight_scale"].view(scale.shape)
        found["weight_zero_point"] = _row_sums(use.form, weight, scale) * SHIFT
        found["weight"] = torch.stack([*map(_by_input, weight)]) if experts else _by_input(weight)
        return found


def _fits(form: Form, weight: Tensor, most: int) -> bool:
    width, features = form.width(weight), weight.shape[-2]
    group = form.group(width)
    return width <= most and features % INT4S == 0 and (group == width or (group == GROUP and width % GROUP == 0))


def _by_input(weight: Tensor) -> Tensor:
    """Return int4 weights in the memory of ``[in_features, out_features / 8]``, in their own shape."""
    return pack_int4(unpack_int4(weight).t()).view(weight.shape)


def _row_sums(form: Form, weight: Tensor, scale: Tensor) -> Tensor:
    """Return the sums of a scaled weight's rows, float32 ``[..., out_features, 1]``. Widens some rows at a time."""
    count = max(1, WIDENED // max(1, form.width(weight)))
    rows = zip(weight.flatten(0, -2).split(count), scale.flatten(0, -2).split(count), strict=True)
    return torch.cat([dequantize(form, *each).sum(-1, keepdim=True) for each in rows]).view(*weight.shape[:-1], 1)
