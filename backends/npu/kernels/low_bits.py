"""Kernels of weights with scales, and inputs in floating point: int8 and int4, and any others, which they widen.

Sources: the documentation of torch_npu and of CANN's ops-nn and ops-transformer. npu_weight_quant_batchmatmul adds its
offset to the numbers before it scales them; it takes int8 weights best transposed without FRACTAL_NZ, and plain with
it. npu_grouped_matmul takes scales of groups for int4 weights without offsets only, and needs an offset for int8.
Neither takes float8 or float4 on the generations A2 and A3, so that each step widens them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch_npu
from torch import Tensor
from torch.nn import functional

from hal.ops.forms import SECOND, Form, exponent_values, float4_values, float8_values, spread
from hal.ops.kernels.kernel_table import Kernel
from hal.ops.projection import floating_bias

from .experts import add_bias, grouped_matmul, prepared_bias
from .kernels import in_nd, in_transposed_nz

if TYPE_CHECKING:
    from hal.nn import WeightUse

_Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
_Add = Callable[[Tensor, Tensor], Tensor]


def takes(form: Form) -> bool:
    """Return whether a form is of integers with scales of rows or of their groups, and inputs that are not rounded."""
    return form.numbers in ("int8", "int4") and form.rows == 1 and form.inputs == "float"


class LowBits:
    """The kernels. Those that widen a weight look up float8, float4 and 8-bit scales in tables.

    Args:
        device: the device.
        product: the kernel of ``grouped_linear`` for floating-point weights.
        nz: whether int8 weights that are only scaled by row are in FRACTAL_NZ.
        expert_groups: the sizes of groups that npu_grouped_matmul takes; empty for any.
    """

    def __init__(self, device: torch.device, product: Kernel, *, nz: bool, expert_groups: Collection[int] = ()) -> None:
        self._product, self._nz, self._expert_groups = product, nz, expert_groups
        each = torch.arange(256, dtype=torch.uint8)
        float8 = float8_values(each)
        tables = {"float8": float8, "float4": float4_values(each.unsqueeze(-1))}
        tables |= {"e4m3": float8, "e8m0": exponent_values(each)}
        self._tables = {
            dtype: {name: table.to(dtype).to(device) for name, table in tables.items()}
            for dtype in (torch.bfloat16, torch.float16, torch.float32)
        }

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        """See :func:`hal.ops.linear`. One launch with prepared weights; others are converted first."""
        weight_scale, weight_zero_point, _, _, form = rest
        return torch_npu.npu_weight_quant_batchmatmul(  # type: ignore[no-any-return]
            x,
            weight.t(),
            self._scales(weight_scale, form, x.dtype).to(x.dtype).t(),
            antiquant_offset=None if weight_zero_point is None else _offset(weight_zero_point, x.dtype).t(),
            bias=None if bias is None else prepared_bias(bias, x.dtype),
            antiquant_group_size=form.columns if weight_scale.shape[1] > 1 else 0,
        )

    def grouped_linear(self, x: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        """See :func:`hal.ops.grouped_linear`.

        One launch with prepared weights for int4 groups without zero points, if they are equal, and with one group per
        row. Otherwise the weights are widened first.
        """
        weight_scale, weight_zero_point, _, _, form = rest
        int4, groups = form.numbers == "int4", weight_scale.shape[2] > 1
        fits = int4 and weight_zero_point is None and form.width(weight) % max(form.columns, 1) == 0
        fits = fits and (not self._expert_groups or form.columns in self._expert_groups)
        if groups and not fits:
            return self.widened_grouped_linear(x, weight, counts, bias, *rest)
        options: dict[str, Any] = {} if bias is None else {"bias": [prepared_bias(bias, x.dtype)]}
        scale = self._scales(weight_scale, form, x.dtype).to(x.dtype)
        scale = scale.transpose(1, 2) if groups else scale.squeeze(-1)
        if weight_zero_point is not None:
            options["antiquant_offset"] = [_offset(weight_zero_point, x.dtype).squeeze(-1)]
        elif not int4:  # the weight was not prepared
            options["antiquant_offset"] = [torch.zeros_like(scale)]
        return grouped_matmul(x, weight, counts, antiquant_scale=[scale], **options)

    def widened_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        """See :func:`hal.ops.linear`. It takes weights in any form."""
        return self._widened_product(_linear, torch.add, x, weight, bias, *rest)

    def widened_grouped_linear(
        self, x: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None, *rest: Any
    ) -> Tensor:
        """See :func:`hal.ops.grouped_linear`. It takes weights in any form that is not exact."""
        return self._widened_product(
            lambda x, wide, added: self._product(x, wide, counts, added),
            lambda values, added: add_bias(values, added, counts),
            x,
            weight,
            bias,
            *rest,
        )

    def _widened_product(
        self, product: _Product, add: _Add, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any
    ) -> Tensor:
        weight_scale, weight_zero_point, x_scale, dtype, form = rest
        bias = floating_bias(bias, weight_scale, form)
        kind = x.dtype if x.is_floating_point() else dtype
        wide = self.widened(weight, weight_scale, weight_zero_point, kind, form)
        if x_scale is None:
            return product(x.to(kind), wide, bias)
        values = product(x.to(kind), wide, None) * x_scale.unsqueeze(-1)
        return (values if bias is None else add(values, bias)).to(kind)

    def embedding(
        self,
        token_ids: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        weight_zero_point: Tensor | None,
        dtype: torch.dtype | None,
        form: Form,
    ) -> Tensor:
        """See :func:`hal.ops.embedding`. It gathers the rows, and widens them as a projection's weight."""
        blocks = token_ids if form.rows == 1 else token_ids // (form.rows or weight.shape[0])
        if self._takes_nz(form):
            weight = in_nd(weight)
        rows, scale = weight.index_select(0, token_ids), weight_scale.index_select(0, blocks)
        zero = None if weight_zero_point is None else weight_zero_point.index_select(0, blocks)
        return self.widened(rows, scale, zero, dtype or torch.float32, form.of_rows())

    def widened(
        self, weight: Tensor, weight_scale: Tensor, weight_zero_point: Tensor | None, dtype: torch.dtype, form: Form
    ) -> Tensor:
        """Return weights in a dtype, from prepared or other tensors."""
        table = self._tables[dtype].get(form.numbers)
        numbers = form.kind.values(weight) if table is None else table[weight.int()]
        shape = *weight.shape[:-1], form.width(weight)
        numbers, rows, group = numbers.reshape(shape), weight.shape[-2], form.group(shape[-1])
        whole = form.rows == 1 and shape[-1] % group == 0
        if whole:
            numbers = numbers.unflatten(-1, (-1, group))

        def factors(each: Tensor) -> Tensor:
            return each.unsqueeze(-1) if whole else spread(each, form, rows, shape[-1])

        if weight_zero_point is not None:
            numbers = numbers + factors(_offset(weight_zero_point, dtype))
        return (numbers * factors(self._scales(weight_scale, form, dtype))).to(dtype).view(shape)

    def _scales(self, scale: Tensor, form: Form, dtype: torch.dtype) -> Tensor:
        """Return the values of scales, in ``dtype`` of those that are bits."""
        if scale.is_floating_point():
            return scale
        if not form.second:
            return self._tables[dtype][form.scales][scale.int()]
        table, second = self._tables[torch.float32][form.scales], scale[..., -SECOND:]
        second = second.clone(memory_format=torch.contiguous_format).view(torch.float32)
        return (table[scale[..., :-SECOND].int()] * second).to(dtype)

    def _takes_nz(self, form: Form) -> bool:
        return self._nz and form.numbers == "int8" and form.by_row and not form.zero_points

    def prepared(self, weights: Mapping[str, Tensor], use: WeightUse) -> Mapping[str, Tensor]:
        """Return weights in the format and the dtypes of :meth:`linear`."""
        found = self._in_dtype(weights, use)
        if self._takes_nz(use.form):
            found["weight"] = in_transposed_nz(found["weight"])
        return found

    def prepared_experts(self, weights: Mapping[str, Tensor], use: WeightUse) -> Mapping[str, Tensor]:
        """Return weights in the dtypes of :meth:`grouped_linear`, with zero points of 0 for int8 by row."""
        found = self._in_dtype(weights, use)
        scale = found["weight_scale"]
        if use.form.numbers == "int8" and scale.shape[-1] == 1:
            found.setdefault("weight_zero_point", torch.zeros_like(scale))
        return found

    def _in_dtype(self, weights: Mapping[str, Tensor], use: WeightUse) -> dict[str, Tensor]:
        found = dict(self.prepared_to_widen(weights, use))
        found["weight_scale"] = found["weight_scale"].to(use.dtype)
        if "bias" in found:
            found["bias"] = prepared_bias(weights["bias"], use.dtype)
        return found

    def prepared_to_widen(self, weights: Mapping[str, Tensor], use: WeightUse) -> Mapping[str, Tensor]:
        """Return weights with the values of their scales, and what is added to their numbers as zero points.

        Scales of floating-point numbers keep their dtype: float16 does not hold those of float8.
        """
        found = {**weights, "weight_scale": self._scales(weights["weight_scale"], use.form, use.dtype)}
        if "weight_zero_point" in found:
            found["weight_zero_point"] = (-found["weight_zero_point"].float()).to(use.dtype)
        if (bias := floating_bias(found.get("bias"), weights["weight_scale"], use.form)) is not None:
            linear = use.operation == "linear"
            found["bias"] = bias.to(use.dtype) if linear else prepared_bias(bias, use.dtype)
        return found


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return functional.linear(x, weight, None if bias is None else bias.to(x.dtype))


def _offset(zero_point: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what is added to the numbers, in ``dtype``. A zero point in 16 bits was prepared, and is that already."""
    prepared = zero_point.is_floating_point() and zero_point.element_size() == 2
    return zero_point.to(dtype) if prepared else (-zero_point.float()).to(dtype)
