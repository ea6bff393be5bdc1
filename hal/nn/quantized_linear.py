"""Quantized projections, which replace :class:`~hal.nn.Linear` layers that a checkpoint quantizes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from hal import ops
from hal.nn.linear import IN, OUT, Projection
from hal.nn.weights.weight import Consumer, Weight


class QuantizedLinear(Projection):
    """The base of projections with quantized weights, single ones and those of experts.

    A subclass declares its tensors in ``weights``, with :meth:`hal.nn.Projection.declare`. They become buffers, so that
    all parameters of a model have its compute dtype. Tensors with sources are read from the checkpoint, unless its
    format stores others, and the scheme computes the others.

    Args:
        linear: the layer to replace.
        settings: attributes that ``weights`` needs, such as the size of groups.

    Attributes:
        operation: the operation that uses the tensors; None for a layer that no driver prepares tensors of.
        has_bias: whether the replaced layer has a bias. Without, the tensor ``bias`` is None.
        by_inputs: whether ranks that divide it divide its inputs; also of experts that ranks hold whole.
        converted: whether its weight is dequantized at load.
    """

    operation: ClassVar[str | None] = None
    converted: bool = False

    def __init__(self, linear: Projection, **settings: Any) -> None:
        super().__init__(
            linear.in_features,
            linear.out_features,
            parts=linear.parts,
            shard=linear.shard,
            share=linear.share,
            gather=linear.gather,
            num_experts=linear.num_experts,
            rows=linear.rows,
        )
        self.merged, self.by_inputs = linear.merged, linear.shard == IN
        vars(self).update(settings)
        self.has_bias = getattr(linear, "bias", None) is not None
        for name, weight in self.weights.items():
            assert weight.sizes is not None
            absent = name == "bias" and not self.has_bias
            self.register_buffer(name, None if absent else torch.empty(weight.shape(weight.sizes), dtype=weight.dtype))

    @property
    @abstractmethod
    def weights(self) -> Mapping[str, Weight]:
        """The declarations of its tensors, each with its dtype."""

    def declare(
        self, name: str | None, axes: str = f"{OUT} {IN}", *, argument: str | None = None, **options: Any
    ) -> Weight:
        """Return the declaration of a tensor, as :class:`Projection` does, with its consumer.

        Args:
            name: see :class:`Projection`.
            axes: see :class:`Projection`.
            argument: the tensor's argument of the operation; by default, ``name``.
            options: see :class:`Projection`.
        """
        used = argument or name
        if self.operation is not None and used in ops.operation(self.operation).weights:
            options["consumer"] = Consumer(self.operation, used)
        return super().declare(name, axes, **options)


class StaticTensors(QuantizedLinear):
    """The tensors of int8 weights, and of activations that are quantized with the checkpoint's scale and offset.

    All parts, and all experts, share the scale and the offset. Of experts, the tensors with rows have a first dimension
    ``num_experts`` more.

    Attributes:
        weight: ``[out_features, in_features]``, int8, in the layout that the driver prepared.
        deq_scale: ``[out_features]``: the input's scale times each row's scale, float32, or as the driver prepared it.
        quant_bias: ``[out_features]``, int32, in units of deq_scale: the bias minus the contribution of the offset; or
            None.
        input_scale: ``[in_features]``, float32: one value, repeated for kernels that fuse a norm.
        input_offset: ``[in_features]``, int32, one value, repeated; None for 0.
    """

    weight: Tensor
    deq_scale: Tensor
    quant_bias: Tensor | None
    input_scale: Tensor
    input_offset: Tensor | None

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The declarations of its tensors. The scheme computes all but the weight."""
        return {
            "weight": self.declare("weight", dtype=torch.int8),
            "deq_scale": self.declare(None, OUT, argument="deq_scale", dtype=torch.float32),
            "quant_bias": self.declare(None, OUT, dtype=torch.int32),
            "input_scale": self.declare(None, IN, dtype=torch.float32),
            "input_offset": self.declare(None, IN, dtype=torch.int32),
        }


class StaticQuantizedLinear(StaticTensors):
    """An int8 projection whose activations are quantized with the checkpoint's scale and offset."""

    operation = "quant_linear_static"

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in_features]`` to ``[..., out_features]``, of x's dtype."""
        quantized = ops.quantize(x, self.input_scale, self.input_offset)
        return self.join(ops.quant_linear_static(quantized, self.weight, self.deq_scale, self.quant_bias, x.dtype))

    if TYPE_CHECKING:
        __call__ = forward


class ScaledTensors(QuantizedLinear):
    """The tensors of int8 weights with a scale per row.

    Of experts, they have a first dimension ``num_experts`` more.

    Attributes:
        weight: ``[out_features, in_features]``, int8, in the layout that the driver prepared.
        weight_scale: ``[out_features]``, float32, or as the driver prepared it.
        bias: ``[out_features]``, float32, or as the driver prepared it; or None.
    """

    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The declarations of its tensors."""
        return {
            "weight": self.declare("weight", dtype=torch.int8),
            "weight_scale": self.declare("weight_scale", OUT, dtype=torch.float32, column=True),
            "bias": self.declare("bias", OUT, dtype=torch.float32, column=True, added=True),
        }


class DynamicQuantizedLinear(ScaledTensors):
    """An int8 projection whose activations are quantized with a scale per token, from the token's largest element."""

    operation = "quant_linear_dynamic"

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in_features]`` to ``[..., out_features]``, of x's dtype."""
        quantized, scale = ops.dynamic_quantize(x)
        return self.join(ops.quant_linear_dynamic(quantized, scale, self.weight, self.weight_scale, self.bias, x.dtype))

    if TYPE_CHECKING:
        __call__ = forward


class Int8Linear(ScaledTensors):
    """A projection with an int8 weight, and floating-point activations."""

    operation = "linear_int8"

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in_features]`` to ``[..., out_features]``, of x's dtype."""
        return self.join(ops.linear_int8(x, self.weight, self.weight_scale, self.bias))

    if TYPE_CHECKING:
        __call__ = forward
