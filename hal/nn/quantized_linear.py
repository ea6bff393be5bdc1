"""Int8 projections, which replace :class:`~hal.nn.Linear` layers that a checkpoint quantizes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hal import ops
from hal.nn.linear import IN, OUT, Linear, Projection, projection_weight
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
            linear.in_features,
            linear.out_features,
            parts=linear.parts,
            shard=linear.shard,
            share=linear.share,
            gather=linear.gather,
        )
        self.weight: Tensor
        self.register_buffer("weight", torch.empty(linear.weight.shape, dtype=torch.int8))

    @property
    @abstractmethod
    def weights(self) -> Mapping[str, Weight]:
        """The declarations of its tensors."""


class _SchemeLinear(QuantizedLinear):
    """An int8 projection whose weight the checkpoint has, and whose other tensors a scheme computes."""

    operation: str
    """The operation that uses the weight."""

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The declarations of its tensors. The quantization scheme fills all but the weight."""
        weight = projection_weight(self, Consumer(self.operation, "weight"))
        return {"weight": weight, **self._scales(self.shard if self.shard == OUT else None)}

    @abstractmethod
    def _scales(self, shard: str | None) -> Mapping[str, Weight]: ...


def register_static_scales(layer: nn.Module, rows: Sequence[int], in_features: int) -> None:
    """Register the buffers of static quantization, with one value of ``deq_scale`` for each row of the weight."""
    layer.register_buffer("input_scale", torch.empty(in_features))
    layer.register_buffer("input_offset", None)
    layer.register_buffer("deq_scale", torch.empty(rows))
    layer.register_buffer("quant_bias", None)


class StaticQuantizedLinear(_SchemeLinear):
    """An int8 projection whose activations are quantized with the checkpoint's scale and offset.

    Attributes:
        input_scale: ``[in_features]``, float32: one value, repeated for kernels that fuse a norm.
        input_offset: ``[in_features]``, int32, one value, repeated; None for 0.
        deq_scale: ``[out_features]``: the input's scale times each row's scale, float32, or as the driver prepared it.
        quant_bias: ``[out_features]``, int32, in units of deq_scale: the bias minus the contribution of the offset; or
            None.
    """

    operation = "quant_linear_static"

    def __init__(self, linear: Linear) -> None:
        super().__init__(linear)
        self.input_scale: Tensor
        self.input_offset: Tensor | None
        self.deq_scale: Tensor
        self.quant_bias: Tensor | None
        *rows, in_features = linear.weight.shape
        register_static_scales(self, rows, in_features)

    def _scales(self, shard: str | None) -> Mapping[str, Weight]:
        return {
            "deq_scale": Weight((), OUT, shard, consumer=Consumer(self.operation, "deq_scale")),
            "quant_bias": Weight((), OUT, shard),
            "input_scale": Weight((), IN),
            "input_offset": Weight((), IN),
        }

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in_features]`` to ``[..., out_features]``, of x's dtype."""
        quantized = ops.quantize(x, self.input_scale, self.input_offset)
        return self.join(ops.quant_linear_static(quantized, self.weight, self.deq_scale, self.quant_bias, x.dtype))

    if TYPE_CHECKING:
        __call__ = forward


class ScaledLinear(_SchemeLinear):
    """An int8 projection whose only scales are those of the weight.

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


class DynamicQuantizedLinear(ScaledLinear):
    """An int8 projection whose activations are quantized with a scale per token, from the token's largest element."""

    operation = "quant_linear_dynamic"

    def _scales(self, shard: str | None) -> Mapping[str, Weight]:
        return {"weight_scale": Weight((), OUT, shard), "bias": Weight((), OUT, shard)}

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in_features]`` to ``[..., out_features]``, of x's dtype."""
        quantized, scale = ops.dynamic_quantize(x)
        return self.join(ops.quant_linear_dynamic(quantized, scale, self.weight, self.weight_scale, self.bias, x.dtype))

    if TYPE_CHECKING:
        __call__ = forward


class Int8Linear(ScaledLinear):
    """A projection with an int8 weight, and floating-point activations."""

    operation = "linear_int8"

    def _scales(self, shard: str | None) -> Mapping[str, Weight]:
        names = ("weight_scale", "bias")
        return {name: Weight((), OUT, shard, consumer=Consumer(self.operation, name)) for name in names}

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in_features]`` to ``[..., out_features]``, of x's dtype."""
        return self.join(ops.linear_int8(x, self.weight, self.weight_scale, self.bias))

    if TYPE_CHECKING:
        __call__ = forward
