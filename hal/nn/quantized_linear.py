"""Int8 projections, which replace :class:`~hal.nn.Linear` layers that a checkpoint quantizes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hal import ops
from hal.nn.linear import OUT, Linear, Projection, projection_weight
from hal.nn.weights.weight import Consumer, Weight


class QuantizedLinear(Projection):
    """A projection with an int8 weight, and one scale per row.

    Its tensors are buffers, so that all parameters of a model have its compute dtype. A subclass declares them in
    ``weights``. The quantization scheme that inserted the layer fills those without sources.

    Args:
        linear: the layer to replace.

    Attributes:
        weight: ``[out_features, in_features]``, int8, in the layout that the driver prepared.
    """

    def __init__(self, linear: Linear) -> None:
        super().__init__(
            linear.in_features, linear.out_features, parts=linear.parts, shard=linear.shard, share=linear.share,
            gather=linear.gather,
        )  # fmt: skip
        self.weight: Tensor
        self.register_buffer("weight", torch.empty(linear.weight.shape, dtype=torch.int8))

    @property
    @abstractmethod
    def weights(self) -> Mapping[str, Weight]:
        """The declarations of its tensors."""


class StaticQuantizedLinear(QuantizedLinear):
    """An int8 projection whose activations are quantized with the checkpoint's scale and offset.

    Attributes:
        input_scale: ``[in_features]``, float32: one value, repeated for kernels that fuse a norm.
        input_offset: ``[in_features]``, int32, one value, repeated; None for 0.
        deq_scale: ``[out_features]``: the input's scale times each row's scale, float32, or as the driver prepared it.
        quant_bias: ``[out_features]``, int32, in units of deq_scale: the bias minus the contribution of the offset; or
            None.
    """

    def __init__(self, linear: Linear) -> None:
        super().__init__(linear)
        self.input_scale: Tensor
        self.input_offset: Tensor | None
        self.deq_scale: Tensor
        self.quant_bias: Tensor | None
        out_features, in_features = linear.weight.shape
        self.register_buffer("input_scale", torch.empty(in_features))
        self.register_buffer("input_offset", None)
        self.register_buffer("deq_scale", torch.empty(out_features))
        self.register_buffer("quant_bias", None)

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The declarations of its tensors. The quantization scheme fills all but the weight."""
        operation, out = "quant_linear_static", "out_features"
        cut = self.shard if self.shard == out else None
        return {
            "weight": projection_weight(self, Consumer(operation, "weight")),
            "deq_scale": Weight((), out, cut, consumer=Consumer(operation, "deq_scale")),
            "quant_bias": Weight((), out, cut),
            "input_scale": Weight((), "in_features"),
            "input_offset": Weight((), "in_features"),
        }

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in_features]`` to ``[..., out_features]``, of x's dtype."""
        quantized = ops.quantize(x, self.input_scale, self.input_offset)
        return self.join(ops.quant_linear_static(quantized, self.weight, self.deq_scale, self.quant_bias, x.dtype))

    if TYPE_CHECKING:
        __call__ = forward


class DynamicQuantizedLinear(QuantizedLinear):
    """An int8 projection whose activations are quantized with a scale per token, from the token's largest element.

    Attributes:
        weight_scale: ``[out_features]``, float32.
        bias: ``[out_features]``, float32, or None.
    """

    def __init__(self, linear: Linear) -> None:
        super().__init__(linear)
        self.weight_scale: Tensor
        self.bias: Tensor | None
        self.register_buffer("weight_scale", torch.empty(linear.weight.shape[0]))
        self.register_buffer("bias", None)

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The declarations of its tensors. The quantization scheme fills all but the weight."""
        out = "out_features"
        cut = self.shard if self.shard == out else None
        return {
            "weight": projection_weight(self, Consumer("quant_linear_dynamic", "weight")),
            "weight_scale": Weight((), out, cut),
            "bias": Weight((), out, cut),
        }

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in_features]`` to ``[..., out_features]``, of x's dtype."""
        quantized, scale = ops.dynamic_quantize(x)
        return self.join(
            ops.quant_linear_dynamic(quantized, scale, self.weight, self.weight_scale, self.bias, x.dtype)
        )  # fmt: skip

    if TYPE_CHECKING:
        __call__ = forward


class Int8Linear(QuantizedLinear):
    """A projection with an int8 weight, and floating-point activations.

    Attributes:
        weight_scale: ``[out_features]``, float32, or as the driver prepared it.
        bias: ``[out_features]``, float32, or as the driver prepared it; or None.
    """

    def __init__(self, linear: Linear) -> None:
        super().__init__(linear)
        self.weight_scale: Tensor
        self.bias: Tensor | None
        self.register_buffer("weight_scale", torch.empty(linear.weight.shape[0]))
        self.register_buffer("bias", None)

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The declarations of its tensors. The quantization scheme fills all but the weight."""
        operation = "linear_int8"
        cut = self.shard if self.shard == OUT else None
        return {
            "weight": projection_weight(self, Consumer(operation, "weight")),
            "weight_scale": Weight((), OUT, cut, consumer=Consumer(operation, "weight_scale")),
            "bias": Weight((), OUT, cut, consumer=Consumer(operation, "bias")),
        }

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in_features]`` to ``[..., out_features]``, of x's dtype."""
        return self.join(ops.linear_int8(x, self.weight, self.weight_scale, self.bias))

    if TYPE_CHECKING:
        __call__ = forward
