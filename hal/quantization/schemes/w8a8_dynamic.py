"""``w8a8_dynamic``: int8 weights with a scale per row, and int8 activations with a scale per token."""

from __future__ import annotations

from hal.nn.quantized_experts import DynamicQuantizedGroupedLinear
from hal.nn.quantized_linear import DynamicQuantizedLinear
from hal.quantization.schemes.scaled_rows import ScaledRows, row_representations

TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
"""Int8 activations with a scale per token."""


class W8A8Dynamic(ScaledRows):
    """Dynamic W8A8."""

    name = "w8a8_dynamic"
    summary = "int8 weights as w8a16, and int8 activations, dynamic per token"
    representations = row_representations(TOKEN, "W8A8_DYNAMIC")
    layers = DynamicQuantizedLinear, DynamicQuantizedGroupedLinear
