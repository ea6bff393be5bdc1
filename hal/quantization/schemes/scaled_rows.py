"""The common base of schemes whose checkpoints hold int8 weights with a scale per row, and no other scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hal.nn import GroupedLinear, Linear, QuantizedGroupedLinear
from hal.nn.quantized_experts import ScaledGroupedLinear
from hal.nn.quantized_linear import ScaledLinear
from hal.quantization.compressed_tensors import COMPRESSED_TENSORS
from hal.quantization.int8_arithmetic import Activation, ScaledLayer, merge_scaled, quantize_weight
from hal.quantization.modelslim import MODELSLIM
from hal.quantization.scheme import FLOATS, INTEGERS, Scheme, TensorSpec, check_symmetric, unknown_format

_OFFSET = {COMPRESSED_TENSORS: "weight_zero_point", MODELSLIM: "weight_offset"}


class ScaledRows(Scheme):
    """Int8 weights with a scale per row.

    Attributes:
        layers: the classes of the layers that replace a linear layer, and the projections of experts.
    """

    writes = frozenset(_OFFSET)
    layers: ClassVar[tuple[type[ScaledLinear], type[ScaledGroupedLinear]]]

    def layer(self, linear: Linear) -> ScaledLinear:
        return self.layers[0](linear)

    def grouped_layer(self, linear: GroupedLinear) -> ScaledGroupedLinear:
        return self.layers[1](linear)

    def tensors(self, format: str, rows: int, bias: bool) -> Mapping[str, TensorSpec]:
        column = ((rows, 1), (rows,))
        found = {
            "weight_scale": TensorSpec(column),
            self._offset(format): TensorSpec(column, INTEGERS | FLOATS, required=False),
        }
        if bias:
            shapes = {COMPRESSED_TENSORS: ((rows,),), MODELSLIM: ((rows,), (rows, 1))}
            found["bias"] = TensorSpec(shapes[format])
        return found

    def part(self, format: str, name: str, tensors: Mapping[str, Tensor], statistics: Tensor | None) -> ScaledLayer:
        offset = self._offset(format)
        check_symmetric(name, offset, tensors.get(offset))
        bias = tensors.get("bias")
        scale = tensors["weight_scale"].flatten().float()
        return ScaledLayer(name, scale, None if bias is None else bias.flatten().float())

    def finish(self, layer: nn.Module, parts: Sequence[Any]) -> Mapping[str, Tensor | None]:
        merged = merge_scaled(parts)
        if isinstance(layer, QuantizedGroupedLinear):
            return {"weight_scale": merged.weight_scale.view(layer.weight.shape[:2])}
        return {"weight_scale": merged.weight_scale, "bias": merged.bias}

    def write(
        self,
        format: str,
        name: str,
        weight: Tensor,
        bias: Tensor | None,
        activation: Activation | None,
        dtype: torch.dtype,
    ) -> dict[str, Tensor]:
        values, scale = quantize_weight(name, weight)
        column = scale.unsqueeze(-1)
        found = {"weight": values, "weight_scale": column} | ({} if bias is None else {"bias": bias})
        if format == COMPRESSED_TENSORS:
            return found
        if format == MODELSLIM:
            return {**found, "weight_offset": torch.zeros_like(column)}
        raise unknown_format(self, format)

    def _offset(self, format: str) -> str:
        """Return the last part of the name of the tensor that holds the zero points of the weight."""
        if format not in _OFFSET:
            raise unknown_format(self, format)
        return _OFFSET[format]
