"""Projections in int8, which stand where a checkpoint's quantised :class:`~hal.nn.Linear` would."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hal import ops


class QuantizedLinear(nn.Module):
    """A projection whose weight is int8, with one scale for each of its rows.

    Its tensors are buffers, so that a model's parameters are still all of the dtype that it computes in.

    Args:
        in_features: of the input.
        out_features: rows of the weight, of all parts together.
        parts: of a :class:`~hal.nn.MergedLinear`, whose place it takes: each part's name and rows.

    Attributes:
        weight: ``[out_features, in_features]``, int8, in the layout that the driver prepared.
    """

    def __init__(self, in_features: int, out_features: int, parts: Mapping[str, int] | None = None) -> None:
        super().__init__()
        self.parts = dict(parts or {})
        self.weight: Tensor
        self.register_buffer("weight", torch.empty(out_features, in_features, dtype=torch.int8))


class StaticQuantizedLinear(QuantizedLinear):
    """Activations are quantised by a scale and an offset that the checkpoint fixes.

    Attributes:
        input_scale: ``[in_features]``, float32: one value repeated, as kernels that also normalise want it.
        input_offset: ``[in_features]``, int32, one value likewise; or None for 0.
        deq_scale: ``[out_features]``: the input's scale times the scale of each row, float32, or as the driver
            prepared it.
        quant_bias: ``[out_features]``, int32, or None: in units of deq_scale, the bias less what the offset adds.
    """

    def __init__(self, in_features: int, out_features: int, parts: Mapping[str, int] | None = None) -> None:
        super().__init__(in_features, out_features, parts)
        self.input_scale: Tensor
        self.input_offset: Tensor | None
        self.deq_scale: Tensor
        self.quant_bias: Tensor | None
        self.register_buffer("input_scale", torch.empty(in_features))
        self.register_buffer("input_offset", None)
        self.register_buffer("deq_scale", torch.empty(out_features))
        self.register_buffer("quant_bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]``, of x's dtype."""
        quantized = ops.quantize(x, self.input_scale, self.input_offset)
        return ops.quant_linear_static(quantized, self.weight, self.deq_scale, self.quant_bias, x.dtype)


class DynamicQuantizedLinear(QuantizedLinear):
    """Activations are quantised by a scale for each token, from its largest element.

    Attributes:
        weight_scale: ``[out_features]``, float32.
        bias: ``[out_features]``, float32, or None.
    """

    def __init__(self, in_features: int, out_features: int, parts: Mapping[str, int] | None = None) -> None:
        super().__init__(in_features, out_features, parts)
        self.weight_scale: Tensor
        self.bias: Tensor | None
        self.register_buffer("weight_scale", torch.empty(out_features))
        self.register_buffer("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]``, of x's dtype."""
        quantized, scale = ops.dynamic_quantize(x)
        return ops.quant_linear_dynamic(quantized, scale, self.weight, self.weight_scale, self.bias, x.dtype)
