"""``w4a8_dynamic``: int4 weights with a scale for each group of inputs, and int8 activations with one per token."""

from __future__ import annotations

from typing import ClassVar

from hal.nn import GroupedLinear, Linear
from hal.nn.int4_linear import Int4GroupedLinear, Int4Linear
from hal.ops.int4_projection import row_sums
from hal.quantization.compressed_tensors import COMPRESSED_TENSORS, ConfigGroup
from hal.quantization.modelslim import INT4, MODELSLIM
from hal.quantization.modelslim_int4 import PackedRows
from hal.quantization.packed_tensors import PACKED, WHOLE, WholeTensors
from hal.quantization.representation import StoredLayer, Tensors
from hal.quantization.schemes.w8a8_dynamic import TOKEN
from hal.quantization.schemes.weight_only import WeightOnly

GROUP = ConfigGroup(
    {"num_bits": 4, "type": "int", "symmetric": True, "dynamic": False},
    TOKEN,
    WHOLE,
    frozenset({"strategy", "group_size", "actorder"}),
    (PACKED,),
)


class W4A8Dynamic(WeightOnly):
    """Dynamic W4A8. Weights are symmetric."""

    name = "w4a8_dynamic"
    summary = "symmetric int4 weights as w4a16, and int8 activations, dynamic per token"
    representations: ClassVar = {COMPRESSED_TENSORS: WholeTensors(GROUP), MODELSLIM: PackedRows(INT4)}
    bits = 4
    expert_biases = False

    def layer(self, linear: Linear) -> Int4Linear:
        return Int4Linear(linear, **self._settings(linear))

    def grouped_layer(self, linear: GroupedLinear) -> Int4GroupedLinear:
        return Int4GroupedLinear(linear, **self._settings(linear))

    def finish(self, stored: StoredLayer) -> Tensors:
        found, size = super().finish(stored), self.group_size or stored.layer.in_features
        weight, scale = found["weight"], found["weight_scale"]
        assert weight is not None
        assert scale is not None
        return {**found, "row_sums": row_sums(weight, scale, size)}
