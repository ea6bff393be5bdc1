"""``w8a16``: int8 weights with a scale per row, and floating-point activations."""

from __future__ import annotations

from hal.nn.quantized_experts import Int8GroupedLinear
from hal.nn.quantized_linear import Int8Linear
from hal.quantization.schemes.scaled_rows import ScaledRows, row_representations


class W8A16(ScaledRows):
    """Int8 weights only."""

    name = "w8a16"
    summary = "int8 weights with a scale for each output channel, and floating-point activations"
    representations = row_representations(None, "W8A16")
    layers = Int8Linear, Int8GroupedLinear
