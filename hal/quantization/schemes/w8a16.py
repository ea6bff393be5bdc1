"""``w8a16``: int8 weights with a scale per row, and floating-point activations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hal.nn.quantized_experts import Int8GroupedLinear
from hal.nn.quantized_linear import Int8Linear
from hal.quantization.compressed_tensors import CHANNEL_WEIGHTS, COMPRESSED_TENSORS, Group
from hal.quantization.modelslim import MODELSLIM
from hal.quantization.schemes.scaled_rows import ScaledRows

_SPELLINGS: Mapping[str, Any] = {COMPRESSED_TENSORS: Group(CHANNEL_WEIGHTS, None), MODELSLIM: "W8A16"}


class W8A16(ScaledRows):
    """Int8 weights only."""

    name = "w8a16"
    summary = "int8 weights with a scale for each output channel, and floating-point activations"
    spellings = _SPELLINGS
    layers = Int8Linear, Int8GroupedLinear
