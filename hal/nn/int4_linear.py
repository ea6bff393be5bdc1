"""Projections with int4 weights in groups and int8 activations, as the scheme ``w4a8_dynamic`` fills them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hal import ops
from hal.nn.linear import OUT
from hal.nn.low_bits import WeightOnlyTensors
from hal.nn.weights.weight import Weight


class Int4Tensors(WeightOnlyTensors):
    """The tensors of symmetric int4 weights in groups, whose activations are quantized with a scale per token.

    Of experts, they have a first dimension ``num_experts`` more.

    Attributes:
        row_sums: ``[out_features]``, float32: the sums of the rows of the scaled weight, or as the driver prepared it.
    """

    row_sums: Tensor

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The declarations of its tensors. The scheme computes all but the bias."""
        found = {name: each for name, each in super().weights.items() if name != "weight_zero_point"}
        return {**found, "row_sums": self.declare(None, OUT, argument="row_sums", dtype=torch.float32)}


class Int4Linear(Int4Tensors):
    """A projection with int4 weights and int8 activations."""

    operation = "quant_linear_int4"

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in_features]`` to ``[..., out_features]``, of x's dtype."""
        quantized, scale = ops.dynamic_quantize(x)
        weights = self.weight, self.weight_scale, self.row_sums, self.bias
        return self.join(ops.quant_linear_int4(quantized, scale, *weights, self.group_size, x.dtype))

    if TYPE_CHECKING:
        __call__ = forward


class Int4GroupedLinear(Int4Tensors):
    """Projections of experts with int4 weights and int8 activations."""

    operation = "quant_grouped_linear_int4"

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Map ``[assignments, in_features]`` to ``[assignments, out_features]``; see :class:`~hal.nn.GroupedLinear`."""
        quantized, scale = ops.dynamic_quantize(x)
        weights = self.weight, self.weight_scale, self.row_sums
        return ops.quant_grouped_linear_int4(quantized, scale, *weights, counts, self.group_size, x.dtype)

    if TYPE_CHECKING:
        __call__ = forward
