"""Int8 projections of experts, which replace :class:`~hal.nn.GroupedLinear` layers that a checkpoint quantizes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hal import ops
from hal.device.group import Group
from hal.nn.experts import EXPERTS, GroupedLinear, grouped_weight
from hal.nn.linear import IN, OUT
from hal.nn.quantized_linear import register_static_scales
from hal.nn.weights.weight import Consumer, Weight


class QuantizedGroupedLinear(nn.Module):
    """A projection per expert with int8 weights, and one scale per row. See :class:`~hal.nn.QuantizedLinear`.

    Args:
        linear: the layer to replace.

    Attributes:
        parts: the rows of each part of an expert, by name.
        shard: the shard axis of the replaced layer.
        weight: ``[num_experts, out_features, in_features]``, int8, in the layout that the driver prepared.
    """

    operation: str
    """The operation that uses the weight."""

    def __init__(self, linear: GroupedLinear) -> None:
        super().__init__()
        self.num_experts, self.parts, self.shard = linear.num_experts, dict(linear.parts), linear.shard
        self.weight: Tensor
        self.register_buffer("weight", torch.empty(linear.weight.shape, dtype=torch.int8))

    def split(self, tensor: Group) -> None:
        """Compute this rank's part of every expert from now on; :class:`~hal.nn.Experts` adds the ranks' results."""

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The declarations of its tensors. The quantization scheme fills all but the weight."""
        consumer = Consumer(self.operation, "weight")
        weight = grouped_weight(self.num_experts, self.parts, self.shard, consumer)
        return {"weight": weight, **self._scales(self.shard if self.shard != IN else None)}

    @abstractmethod
    def _scales(self, shard: str | None) -> Mapping[str, Weight]: ...


class StaticQuantizedGroupedLinear(QuantizedGroupedLinear):
    """Int8 projections of experts, whose activations are quantized with one scale and offset for all experts.

    Attributes:
        input_scale: as in :class:`~hal.nn.quantized_linear.StaticQuantizedLinear`.
        input_offset: as in :class:`~hal.nn.quantized_linear.StaticQuantizedLinear`.
        deq_scale: ``[num_experts, out_features]``, float32, or as the driver prepared it.
        quant_bias: ``[num_experts, out_features]``, int32, or None.
    """

    operation = "quant_grouped_linear_static"

    def __init__(self, linear: GroupedLinear) -> None:
        super().__init__(linear)
        self.input_scale: Tensor
        self.input_offset: Tensor | None
        self.deq_scale: Tensor
        self.quant_bias: Tensor | None
        *rows, in_features = linear.weight.shape
        register_static_scales(self, rows, in_features)

    def _scales(self, shard: str | None) -> Mapping[str, Weight]:
        rows = f"{EXPERTS} {OUT}"
        return {
            "deq_scale": Weight((), rows, shard, consumer=Consumer(self.operation, "deq_scale")),
            "quant_bias": Weight((), rows, shard),
            "input_scale": Weight((), IN),
            "input_offset": Weight((), IN),
        }

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Map ``[assignments, in_features]`` to ``[assignments, out_features]``; see :class:`GroupedLinear`."""
        quantized = ops.quantize(x, self.input_scale, self.input_offset)
        return ops.quant_grouped_linear_static(quantized, self.weight, self.deq_scale, self.quant_bias, counts, x.dtype)

    if TYPE_CHECKING:
        __call__ = forward


class ScaledGroupedLinear(QuantizedGroupedLinear):
    """Int8 projections of experts whose only scales are those of the weights.

    Attributes:
        weight_scale: ``[num_experts, out_features]``, float32, or as the driver prepared it.
    """

    def __init__(self, linear: GroupedLinear) -> None:
        super().__init__(linear)
        self.weight_scale: Tensor
        self.register_buffer("weight_scale", torch.empty(linear.weight.shape[:2]))

    def _scales(self, shard: str | None) -> Mapping[str, Weight]:
        consumer = Consumer(self.operation, "weight_scale")
        return {"weight_scale": Weight((), f"{EXPERTS} {OUT}", shard, consumer=consumer)}


class DynamicQuantizedGroupedLinear(ScaledGroupedLinear):
    """Int8 projections of experts, whose activations are quantized with a scale per row."""

    operation = "quant_grouped_linear_dynamic"

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Map ``[assignments, in_features]`` to ``[assignments, out_features]``; see :class:`GroupedLinear`."""
        quantized, scale = ops.dynamic_quantize(x)
        return ops.quant_grouped_linear_dynamic(quantized, scale, self.weight, self.weight_scale, counts, x.dtype)

    if TYPE_CHECKING:
        __call__ = forward


class Int8GroupedLinear(ScaledGroupedLinear):
    """Int8 projections of experts, with floating-point activations."""

    operation = "grouped_linear_int8"

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Map ``[assignments, in_features]`` to ``[assignments, out_features]``; see :class:`GroupedLinear`."""
        return ops.grouped_linear_int8(x, self.weight, self.weight_scale, counts)

    if TYPE_CHECKING:
        __call__ = forward
