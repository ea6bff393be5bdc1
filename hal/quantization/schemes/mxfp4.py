"""``mxfp4``: experts in microscaling float4, with floating-point activations."""

from __future__ import annotations

from torch import Tensor

from hal.errors import ConfigError
from hal.nn import GroupedLinear, Linear
from hal.nn.low_bits import Mxfp4GroupedLinear
from hal.ops.experts.mxfp4 import GROUP, widen
from hal.quantization.representation import Tensors
from hal.quantization.scheme import Scheme


class Mxfp4Experts(Scheme):
    """Float4 weights of experts, in groups of 32."""

    name = "mxfp4"
    summary = "experts in float4 with a power of two as the scale of 32 inputs"
    expert_biases = True

    def layer(self, linear: Linear) -> Mxfp4GroupedLinear:
        raise ConfigError(
            "mxfp4 is for experts, and config.json quantizes other layers with it",
            "add them to modules_to_not_convert, or load the unquantized checkpoint",
        )

    def grouped_layer(self, linear: GroupedLinear) -> Mxfp4GroupedLinear:
        if linear.in_features % GROUP:
            raise ConfigError(
                f"experts have {linear.in_features} inputs, not a multiple of {GROUP}",
                "load the unquantized checkpoint",
            )
        return Mxfp4GroupedLinear(linear, fused=linear.fused)

    def dequantize(self, tensors: Tensors, width: int) -> Tensor:
        weight, scale = tensors["weight"], tensors["weight_scale"]
        assert weight is not None
        assert scale is not None
        return widen(weight, scale)
