"""Float4 weights as compressed-tensors packs them: ``nvfp4-pack-quantized`` and ``mxfp4-pack-quantized``.

Sources: the code of compressed-tensors; NVIDIA, *Introducing NVFP4 for Efficient and Accurate Low-Precision Inference*,
2025.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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


class Float4Tensors(Reader):
    """``weight_packed`` and ``weight_scale``; of second scales ``weight_global_scale``, which divides the others."""

    def declare(self, stored: StoredLayer) -> Mapping[str, Weight]:
        declare = stored.layer.declare
        if fused := getattr(stored.layer, "fused", None):
            raise ConfigError(
                f"the checkpoint has {fused} of all experts as one tensor, which hal does not read in float4",
                "use a checkpoint with a tensor for each expert",
            )
        bits: dict[str, Any] = {"dtype": torch.uint8, "checks": (EXPONENTS,)}
        if stored.form.scales == "e4m3":
            bits = {"dtype": torch.float8_e4m3fn, "checks": (NOT_NEGATIVE,)}
        found = {
            "numbers": declare("weight_packed", packing={IN: FLOAT4S}, dtype=torch.uint8),
            "scales": declare("weight_scale", **bits, **stored.scales),
        }
        whole: dict[str, Any] = {"stored": FLOATS, "dtype": torch.float32, "every_rank": True, "column": True}
        if stored.form.second:
            found["second"] = declare("weight_global_scale", "", checks=(POSITIVE,), **whole)
        # Static scales of activations, which stay floating-point.
        return {**found, "input_scale": declare("input_global_scale", "", optional=True, **whole)}

    def decode(self, stored: StoredLayer) -> Tensors:
        weight, scale = stored["numbers"], stored.of_rank(stored["scales"].view(torch.uint8))
        if stored.form.second:
            scale = with_second(scale, stored.rows_of(stored["second"].reciprocal(), weight))
        return {"weight": weight, "weight_scale": scale, "bias": stored.tensors.get("bias")}
