"""``w4a16`` and ``w8a16_group``: integer weights with a scale for each group of inputs, and floating activations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from hal.errors import ConfigError
from hal.nn import GroupedLinear, Linear, Projection
from hal.nn.low_bits import WeightOnlyGroupedLinear, WeightOnlyLinear, WeightOnlyTensors
from hal.ops.weight_only import INT4S, dequantize
from hal.quantization.compressed_tensors import COMPRESSED_TENSORS
from hal.quantization.packed_tensors import WHOLE, PackedTensors, WholeTensors, packed_group
from hal.quantization.representation import Representation, StoredLayer, Tensors
from hal.quantization.scheme import Scheme

GROUPS = "input_groups"
"""The tensor of the group of each input."""


class WeightOnly(Scheme):
    """Weights in groups.

    Args:
        group_size: the inputs of a group; None for one group per row.
        symmetric: whether all zero points are 0.
        format: that of compressed-tensors; None for the one that hal writes.
        ordered: whether the checkpoint may group the inputs by their activations (act-order).

    Attributes:
        bits: 8 or 4.
    """

    bits: ClassVar[int]
    expert_biases = True

    def __init__(
        self,
        group_size: int | None = None,
        *,
        symmetric: bool = True,
        format: str | None = None,
        ordered: bool = False,
    ) -> None:
        self.group_size, self.symmetric, self.format, self.ordered = group_size, symmetric, format, ordered

    def represented(self, format: str) -> Representation | None:
        """Return the representation of its format in compressed-tensors; see :meth:`Scheme.represented`."""
        found = super().represented(format)
        if found is None or format != COMPRESSED_TENSORS or self.format in (None, found.description.format):
            return found
        kind = WholeTensors if self.format == WHOLE else PackedTensors
        return kind(found.description)

    def configured(self, settings: Mapping[str, Any]) -> Scheme:
        """Return the scheme for ``strategy``, ``group_size``, ``symmetric`` and ``actorder``.

        One group per row is the strategy ``channel``, or without a strategy, a size of -1 or None.
        """
        size, symmetric = settings.get("group_size"), settings.get("symmetric", True)
        strategy = settings.get("strategy")
        grouped = size not in (None, -1)
        if strategy not in (None, "group" if grouped else "channel"):
            raise ConfigError(
                f"the strategy of quantized weights is {strategy!r:.60} with the group_size {size!r:.60}",
                "use the strategy channel, or group with a group_size",
            )
        size = size if grouped else None
        if size is not None and (type(size) is not int or size < 1):
            raise ConfigError(f"the group_size of quantized weights is {size!r:.60}", "make it positive, or -1")
        if type(symmetric) is not bool:
            raise ConfigError(f"symmetric of quantized weights is {symmetric!r:.60}", "make it true or false")
        ordered = grouped and settings.get("actorder") == "group"
        return type(self)(size, symmetric=symmetric, format=settings.get("format"), ordered=ordered)

    @property
    def settings(self) -> Mapping[str, Any]:
        strategy = "channel" if self.group_size is None else "group"
        return {"strategy": strategy, "group_size": self.group_size, "symmetric": self.symmetric}

    def layer(self, linear: Linear) -> WeightOnlyTensors:
        return WeightOnlyLinear(linear, ordered=self.ordered, **self._settings(linear))

    def grouped_layer(self, linear: GroupedLinear) -> WeightOnlyTensors:
        return WeightOnlyGroupedLinear(linear, ordered=self.ordered, **self._settings(linear))

    def finish(self, stored: StoredLayer) -> Tensors:
        layer, zero = stored.layer, stored.tensors.get("weight_zero_point")
        assert isinstance(layer, WeightOnlyTensors)
        if layer.symmetric and zero is not None:
            stored.check_rows(
                ~zero.any(-1),
                f"{{}} has zero points other than {1 << layer.bits - 1}, but weights are described as symmetric",
            )
        inputs = ("input_order",) * ("input_order" in layer.weights) + (GROUPS,) * layer.any_groups
        return {**super().finish(stored), **{name: stored.tensors.get(name) for name in inputs}}

    def dequantize(self, tensors: Tensors, width: int) -> Tensor:
        weight, scale, zero = tensors["weight"], tensors["weight_scale"], tensors.get("weight_zero_point")
        assert weight is not None
        assert scale is not None
        if (groups := tensors.get(GROUPS)) is not None:
            return dequantize(weight, scale[:, groups], zero if zero is None else zero[:, groups], 1)
        return dequantize(weight, scale, zero, self.group_size or width)

    def _settings(self, linear: Projection) -> dict[str, Any]:
        width, size = linear.in_features, self.group_size or linear.in_features
        if self.bits == 4 and (width % INT4S or size % INT4S):
            raise ConfigError(
                f"a layer has {width} inputs in groups of {size}, and hal packs {INT4S} of 4 bits",
                f"quantize it in groups of a multiple of {INT4S}, or exclude it in the quantization config",
            )
        return {"bits": self.bits, "group_size": size, "symmetric": self.symmetric}


class W4A16(WeightOnly):
    """Weights of 4 bits."""

    name = "w4a16"
    representations: ClassVar = {COMPRESSED_TENSORS: PackedTensors(packed_group(4))}
    summary = "int4 weights with a scale, and perhaps a zero point, for each group of inputs or output channel"
    bits = 4


class W8A16Group(WeightOnly):
    """Weights of 8 bits, in groups or with zero points."""

    name = "w8a16_group"
    representations: ClassVar = {COMPRESSED_TENSORS: PackedTensors(packed_group(8))}
    summary = "int8 weights with the same scales and zero points as w4a16"
    bits = 8
