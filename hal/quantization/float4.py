"""Floating-point weights of 4 or 8 bits whose scales of blocks are bits of one byte.

Sources: the code of compressed-tensors; NVIDIA, *Introducing NVFP4 for Efficient and Accurate Low-Precision Inference*,
2025.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from hal.errors import ConfigError
from hal.nn import ValueCheck, Weight
from hal.nn.linear import IN
from hal.ops.forms import FLOAT4S, with_second
from hal.quantization.integer_arithmetic import AGAIN
from hal.quantization.stored_layer import Reader, StoredLayer, Tensors
from hal.quantization.value_checks import FLOATS, NOT_NEGATIVE, POSITIVE

NOT_A_NUMBER = 255
EXPONENTS = ValueCheck(
    lambda values: not bool((values == NOT_A_NUMBER).any()), f"has the exponent {NOT_A_NUMBER}, NaN", AGAIN
)


@attrs.frozen(slots=False)
class BlockFloats(Reader):
    """Numbers, ``weight_scale``, and of second scales a number for each tensor.

    Attributes:
        numbers: the name of the tensor of numbers.
        second: that of a second scale.
        input_scale: that of a static scale of activations, which stay floating-point.
        divides: whether the second scale divides the others, and does not multiply them.
    """

    numbers: str = "weight_packed"
    second: str = "weight_global_scale"
    input_scale: str = "input_global_scale"
    divides: bool = True

    def declare(self, stored: StoredLayer) -> Mapping[str, Weight]:
        declare = stored.layer.declare
        if fused := getattr(stored.layer, "fused", None):
            raise ConfigError(
                f"the checkpoint has {fused} of all experts as one tensor, which hal does not read in this form",
                "use a checkpoint with a tensor for each expert",
            )
        bits: dict[str, Any] = {"dtype": torch.uint8, "checks": (EXPONENTS,)}
        if stored.form.scales == "e4m3":
            bits = {"dtype": torch.float8_e4m3fn, "checks": (NOT_NEGATIVE,)}
        held: dict[str, Any] = {"dtype": torch.float8_e4m3fn}
        if stored.form.numbers == "float4":
            held = {"dtype": torch.uint8, "packing": {IN: FLOAT4S}}
        found = {
            "numbers": declare(self.numbers, **held),
            "scales": declare("weight_scale", **bits, **stored.scales),
        }
        whole: dict[str, Any] = {"stored": FLOATS, "dtype": torch.float32, "every_rank": True, "column": True}
        if stored.form.second:
            found["second"] = declare(self.second, "", checks=(POSITIVE,), **whole)
        return {**found, "input_scale": declare(self.input_scale, "", optional=True, **whole)}

    def decode(self, stored: StoredLayer) -> Tensors:
        weight = stored["numbers"].view(torch.uint8)
        scale = stored.of_rank(stored["scales"].view(torch.uint8))
        if stored.form.second:
            second = stored["second"].reciprocal() if self.divides else stored["second"]
            scale = with_second(scale, stored.rows_of(second, weight))
        return {"weight": weight, "weight_scale": scale, "bias": stored.tensors.get("bias")}
