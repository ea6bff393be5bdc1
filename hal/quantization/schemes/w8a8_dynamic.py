"""``w8a8_dynamic``: int8 weights with a scale per row, and int8 activations with a scale per token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hal.nn.quantized_experts import DynamicQuantizedGroupedLinear
from hal.nn.quantized_linear import DynamicQuantizedLinear
from hal.quantization.compressed_tensors import CHANNEL_WEIGHTS, COMPRESSED_TENSORS, Group
from hal.quantization.modelslim import MODELSLIM
from hal.quantization.schemes.scaled_rows import ScaledRows

_SPELLINGS: Mapping[str, Any] = {
    COMPRESSED_TENSORS: Group(
        CHANNEL_WEIGHTS, {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    ),
    MODELSLIM: "W8A8_DYNAMIC",
}


class W8A8Dynamic(ScaledRows):
    """Dynamic W8A8."""

    name = "w8a8_dynamic"
    summary = "the same weights, and int8 activations, dynamic per token"
    spellings = _SPELLINGS
    layers = DynamicQuantizedLinear, DynamicQuantizedGroupedLinear
