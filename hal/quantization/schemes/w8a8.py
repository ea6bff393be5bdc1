"""``w8a8``: int8 weights with a scale per row, and int8 activations with a fixed scale and offset per layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hal.errors import CheckpointError
from hal.nn import GroupedLinear, Linear
from hal.nn.quantized_experts import StaticQuantizedGroupedLinear
from hal.nn.quantized_linear import StaticQuantizedLinear
from hal.quantization.compressed_tensors import CHANNEL_WEIGHTS, COMPRESSED_TENSORS, Group
from hal.quantization.int8_arithmetic import (
    AGAIN,
    Activation,
    StaticLayer,
    activation_for,
    fold,
    input_activation,
    merge_static,
    quantize_weight,
)
from hal.quantization.modelslim import MODELSLIM
from hal.quantization.scheme import FLOATS, INTEGERS, Scheme, TensorSpec, check_symmetric, int8_row_sums, unknown_format

_SPELLINGS: Mapping[str, Any] = {
    COMPRESSED_TENSORS: Group(CHANNEL_WEIGHTS, {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False}),
    MODELSLIM: "W8A8",
}


class W8A8(Scheme):
    """Static W8A8."""

    name = "w8a8"
    summary = "the same weights, and int8 activations, static per tensor"
    spellings = _SPELLINGS
    writes = frozenset(_SPELLINGS)
    calibrated = True

    def layer(self, linear: Linear) -> StaticQuantizedLinear:
        return StaticQuantizedLinear(linear)

    def grouped_layer(self, linear: GroupedLinear) -> StaticQuantizedGroupedLinear:
        return StaticQuantizedGroupedLinear(linear)

    def tensors(self, format: str, rows: int, bias: bool) -> Mapping[str, TensorSpec]:
        one, column, row = ((1,), ()), ((rows, 1), (rows,)), ((rows,), (rows, 1))
        if format == COMPRESSED_TENSORS:
            found = {
                "weight_scale": TensorSpec(column),
                "weight_zero_point": TensorSpec(column, INTEGERS | FLOATS, required=False),
                "input_scale": TensorSpec(one),
                "input_zero_point": TensorSpec(one, INTEGERS | FLOATS, required=False),
            }
            return {**found, "bias": TensorSpec(((rows,),))} if bias else found
        if format == MODELSLIM:
            return {
                "input_scale": TensorSpec(one),
                "input_offset": TensorSpec(one, INTEGERS | FLOATS),
                "deq_scale": TensorSpec(row, frozenset({"F32", "BF16", "I64"})),
                "quant_bias": TensorSpec(row, frozenset({"I32"})),
                # Redundant with the three above, which are more precise.
                "weight_scale": TensorSpec(column, required=False),
                "bias": TensorSpec(row, required=False),
                "weight_offset": TensorSpec(column, INTEGERS | FLOATS, required=False),
            }
        raise unknown_format(self, format)

    def row_statistics(self, rows: Tensor) -> Tensor:
        """Return the sums of the rows, which the input's offset is multiplied by."""
        return int8_row_sums(rows)

    def part(self, format: str, name: str, tensors: Mapping[str, Tensor], statistics: Tensor | None) -> StaticLayer:
        assert statistics is not None
        if format == COMPRESSED_TENSORS:
            check_symmetric(name, "weight_zero_point", tensors.get("weight_zero_point"))
            activation = input_activation(name, tensors["input_scale"], tensors.get("input_zero_point"))
            return fold(name, activation, tensors["weight_scale"].flatten(), statistics, tensors.get("bias"))
        if format == MODELSLIM:
            check_symmetric(name, "weight_offset", tensors.get("weight_offset"))
            activation = input_activation(name, tensors["input_scale"], tensors["input_offset"])
            deq_scale = tensors["deq_scale"].flatten()
            if deq_scale.dtype == torch.int64:
                deq_scale = _from_bits(name, deq_scale)
            return StaticLayer(name, activation, deq_scale.float(), tensors["quant_bias"].flatten().long(), statistics)
        raise unknown_format(self, format)

    def finish(self, layer: nn.Module, parts: Sequence[Any]) -> Mapping[str, Tensor | None]:
        assert isinstance(layer, StaticQuantizedLinear | StaticQuantizedGroupedLinear)
        merged, (*rows, width) = merge_static(parts), layer.weight.shape
        scale, offset = merged.activation.scale, merged.activation.offset
        return {
            "input_scale": torch.full((width,), scale, dtype=torch.float32),
            "input_offset": torch.full((width,), offset, dtype=torch.int32) if offset else None,
            "quant_bias": merged.quant_bias.to(torch.int32).view(rows) if bool(merged.quant_bias.any()) else None,
            "deq_scale": merged.deq_scale.view(rows),
        }

    def activation(self, format: str, low: float, high: float, dtype: torch.dtype) -> Activation:
        """Return a symmetric activation for compressed-tensors, or one with an offset for ModelSlim, as their tools."""
        if format == COMPRESSED_TENSORS:
            return activation_for(low, high, symmetric=True)
        if format == MODELSLIM:
            return activation_for(low, high, symmetric=False, dtype=dtype)
        raise unknown_format(self, format)

    def write(
        self,
        format: str,
        name: str,
        weight: Tensor,
        bias: Tensor | None,
        activation: Activation | None,
        dtype: torch.dtype,
    ) -> dict[str, Tensor]:
        assert activation is not None
        values, scale = quantize_weight(name, weight)
        column = scale.unsqueeze(-1)
        if format == COMPRESSED_TENSORS:
            found = {"weight": values, "weight_scale": column} | ({} if bias is None else {"bias": bias})
            found["input_scale"] = torch.tensor([activation.scale], dtype=torch.float32)
            if activation.offset:
                found["input_zero_point"] = torch.tensor([activation.offset], dtype=torch.int8)
            return found
        if format == MODELSLIM:
            folded = fold(name, activation, scale, int8_row_sums(values), bias)
            deq_scale = folded.deq_scale
            if dtype == torch.float16:  # float16 kernels take the bits as int64
                deq_scale = deq_scale.view(torch.int32).long()
            return {
                "weight": values,
                "weight_scale": column,
                "weight_offset": torch.zeros_like(column),
                "input_scale": torch.tensor([activation.scale], dtype=dtype),
                "input_offset": torch.tensor([activation.offset], dtype=dtype),
                "deq_scale": deq_scale,
                "quant_bias": folded.quant_bias.to(torch.int32),
            }
        raise unknown_format(self, format)


def _from_bits(name: str, values: Tensor) -> Tensor:
    if bool((values < 0).any()) or bool((values >= 1 << 32).any()):
        raise CheckpointError(f"deq_scale of {name} is I64, with values that are not float32 bit patterns", AGAIN)
    return values.to(torch.int32).view(torch.float32)
