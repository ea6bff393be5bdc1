"""Projections with weights of 8 or 4 bits and floating-point activations, as quantization schemes fill them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hal import ops
from hal.nn.linear import IN, OUT
from hal.nn.quantized_linear import QuantizedLinear
from hal.nn.weights.weight import Weight
from hal.ops.experts import mxfp4
from hal.ops.weight_only import INT4S


class WeightOnlyTensors(QuantizedLinear):
    """The tensors of weights in groups. Of experts, they have a first dimension ``num_experts`` more.

    Attributes:
        bits: 8 or 4.
        group_size: the inputs of a group; the layer's in_features for one group per row.
        symmetric: whether all zero points are 0.
        ordered: whether the checkpoint may group the inputs in another order.
        fused: as in :class:`~hal.nn.GroupedLinear`.
        weight: as :func:`hal.ops.weight_only_linear` takes it, in the layout that the driver prepared.
        weight_scale: ``[out_features, groups]``, floating, or as the driver prepared it.
        weight_zero_point: ``[out_features, groups]``, int8 or float32, or as the driver prepared it; None for 0.
        bias: ``[out_features]``, or None.
        input_order: ``[in_features]``, int64: the input of each column of the weight; None for the same order. Only if
            ``ordered``, and not of experts.
    """

    bits: int
    group_size: int
    symmetric: bool
    ordered: bool = False
    fused: str | None = None
    weight: Tensor
    weight_scale: Tensor
    weight_zero_point: Tensor | None
    bias: Tensor | None
    input_order: Tensor | None

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The declarations of its tensors. The scheme computes all but the bias."""
        groups = {IN: self.group_size}
        ordered = self.ordered and self.num_experts is None
        order = {"input_order": self.declare(None, IN, dtype=torch.int64)} if ordered else {}
        weight = (
            self.declare(None, argument="weight", packing={IN: INT4S}, dtype=torch.int32)
            if self.bits == 4
            else self.declare(None, argument="weight", dtype=torch.int8)
        )
        return {
            "weight": weight,
            "weight_scale": self.declare(None, argument="weight_scale", group_sizes=groups, dtype=torch.float32),
            "weight_zero_point": self.declare(None, argument="weight_zero_point", group_sizes=groups, dtype=torch.int8),
            "bias": self.declare("bias", OUT, dtype=torch.float32, added=True),
            **order,
        }

    @property
    def any_groups(self) -> bool:
        """Whether each input may be in any group: the weight is dequantized, input by input."""
        return self.ordered and self.converted


class WeightOnlyLinear(WeightOnlyTensors):
    """A projection with weights in groups."""

    operation = "weight_only_linear"

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in_features]`` to ``[..., out_features]``, of x's dtype."""
        if self.ordered and self.input_order is not None:
            x = x.index_select(-1, self.input_order)
        return self.join(
            ops.weight_only_linear(
                x, self.weight, self.weight_scale, self.weight_zero_point, self.bias, self.group_size
            )
        )

    if TYPE_CHECKING:
        __call__ = forward

    def embedding(self, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows of the weight, ``[tokens, in_features]``, in a dtype."""
        scale, zero_point, width = self.weight_scale, self.weight_zero_point, self.in_features
        return ops.weight_only_embedding(token_ids, self.weight, scale, zero_point, width, self.group_size, dtype)


class WeightOnlyGroupedLinear(WeightOnlyTensors):
    """Projections of experts with weights in groups."""

    operation = "weight_only_grouped_linear"

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Map ``[assignments, in_features]`` to ``[assignments, out_features]``; see :class:`~hal.nn.GroupedLinear`."""
        return ops.weight_only_grouped_linear(
            x, self.weight, self.weight_scale, self.weight_zero_point, counts, self.bias, self.group_size
        )

    if TYPE_CHECKING:
        __call__ = forward


class Fp8Tensors(QuantizedLinear):
    """The tensors of weights in float8. Of experts, they have a first dimension ``num_experts`` more.

    Attributes:
        block: the outputs and the inputs of a block; 1 and the layer's in_features for a scale of each row.
        strategy: what has one scale in the checkpoint: ``block``, ``channel`` or ``tensor``.
        fused: as in :class:`~hal.nn.GroupedLinear`.
        weight: ``[out_features, in_features]``, uint8 with the bits of float8_e4m3fn, in the layout that the driver
            prepared.
        weight_scale: float32, one for each block.
        bias: ``[out_features]``, or None.
    """

    block: tuple[int, int]
    strategy: str
    fused: str | None = None
    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The declarations of its tensors. The scheme computes all but the bias."""
        blocks = {OUT: self.block[0], IN: self.block[1]}
        return {
            "weight": self.declare(None, argument="weight", dtype=torch.uint8),
            "weight_scale": self.declare(None, argument="weight_scale", group_sizes=blocks, dtype=torch.float32),
            "bias": self.declare("bias", OUT, dtype=torch.float32, added=True),
        }


class Fp8Linear(Fp8Tensors):
    """A projection with weights in float8."""

    operation = "fp8_linear"

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in_features]`` to ``[..., out_features]``, of x's dtype."""
        return self.join(ops.fp8_linear(x, self.weight, self.weight_scale, self.bias, *self.block))

    if TYPE_CHECKING:
        __call__ = forward


class Fp8GroupedLinear(Fp8Tensors):
    """Projections of experts with weights in float8."""

    operation = "fp8_grouped_linear"

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Map ``[assignments, in_features]`` to ``[assignments, out_features]``; see :class:`~hal.nn.GroupedLinear`."""
        return ops.fp8_grouped_linear(x, self.weight, self.weight_scale, counts, self.bias, *self.block)

    if TYPE_CHECKING:
        __call__ = forward


class Mxfp4GroupedLinear(QuantizedLinear):
    """Projections of experts with weights in MXFP4.

    Attributes:
        fused: as in :class:`~hal.nn.GroupedLinear`.
        weight: ``[num_experts, out_features, in_features / 2]``, uint8, as :func:`hal.ops.mxfp4_grouped_linear` takes
            it, in the layout that the driver prepared.
        weight_scale: ``[num_experts, out_features, in_features / 32]``, uint8, or as the driver prepared it.
        bias: ``[num_experts, out_features]``, or None.
    """

    operation = "mxfp4_grouped_linear"
    fused: str | None = None
    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The declarations of its tensors. The scheme computes all but the bias."""
        numbers, groups = {IN: mxfp4.FLOAT4S}, {IN: mxfp4.GROUP}
        return {
            "weight": self.declare(None, argument="weight", packing=numbers, dtype=torch.uint8),
            "weight_scale": self.declare(None, argument="weight_scale", group_sizes=groups, dtype=torch.uint8),
            "bias": self.declare("bias", OUT, dtype=torch.float32, added=True),
        }

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Map ``[assignments, in_features]`` to ``[assignments, out_features]``; see :class:`~hal.nn.GroupedLinear`."""
        return ops.mxfp4_grouped_linear(x, self.weight, self.weight_scale, counts, self.bias)

    if TYPE_CHECKING:
        __call__ = forward


class DequantizedTensors(QuantizedLinear):
    """The tensors of quantized weights that were dequantized when they were loaded, in the dtype of computation.

    Of experts, they have a first dimension ``num_experts`` more.

    Attributes:
        weight: ``[out_features, in_features]``, in the layout that the driver prepared.
        bias: ``[out_features]``, or None.
    """

    weight: Tensor
    bias: Tensor | None

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The declarations of its tensors. The scheme computes the weight."""
        return {"weight": self.declare(None, argument="weight"), "bias": self.declare("bias", OUT, added=True)}


class DequantizedLinear(DequantizedTensors):
    """A projection with dequantized weights."""

    operation = "linear"

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in_features]`` to ``[..., out_features]``, of x's dtype."""
        return self.join(ops.linear(x, self.weight, self.bias))

    if TYPE_CHECKING:
        __call__ = forward


class DequantizedGroupedLinear(DequantizedTensors):
    """Projections of experts with dequantized weights."""

    operation = "grouped_linear"

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Map ``[assignments, in_features]`` to ``[assignments, out_features]``; see :class:`~hal.nn.GroupedLinear`."""
        return ops.grouped_linear(x, self.weight, counts, self.bias)

    if TYPE_CHECKING:
        __call__ = forward
