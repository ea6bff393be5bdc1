"""Int8 projections of experts, which replace :class:`~hal.nn.GroupedLinear` layers that a checkpoint quantizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from hal import ops
from hal.nn.quantized_linear import ScaledTensors, StaticTensors


class StaticQuantizedGroupedLinear(StaticTensors):
    """Int8 projections of experts, whose activations are quantized with one scale and offset for all experts."""

    operation = "quant_grouped_linear_static"

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Map ``[assignments, in_features]`` to ``[assignments, out_features]``; see :class:`~hal.nn.GroupedLinear`."""
        quantized = ops.quantize(x, self.input_scale, self.input_offset)
        return ops.quant_grouped_linear_static(quantized, self.weight, self.deq_scale, self.quant_bias, counts, x.dtype)

    if TYPE_CHECKING:
        __call__ = forward


class DynamicQuantizedGroupedLinear(ScaledTensors):
    """Int8 projections of experts, whose activations are quantized with a scale per row."""

    operation = "quant_grouped_linear_dynamic"

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Map ``[assignments, in_features]`` to ``[assignments, out_features]``; see :class:`~hal.nn.GroupedLinear`."""
        quantized, scale = ops.dynamic_quantize(x)
        return ops.quant_grouped_linear_dynamic(quantized, scale, self.weight, self.weight_scale, counts, x.dtype)

    if TYPE_CHECKING:
        __call__ = forward


class Int8GroupedLinear(ScaledTensors):
    """Int8 projections of experts, with floating-point activations."""

    operation = "grouped_linear_int8"

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Map ``[assignments, in_features]`` to ``[assignments, out_features]``; see :class:`~hal.nn.GroupedLinear`."""
        return ops.grouped_linear_int8(x, self.weight, self.weight_scale, counts)

    if TYPE_CHECKING:
        __call__ = forward
