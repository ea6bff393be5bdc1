"""``mxfp4``: experts in microscaling float4, which hal holds as int8 with the same values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal.errors import ConfigError
from hal.nn import GroupedLinear, Linear
from hal.nn.low_bits import WeightOnlyGroupedLinear, WeightOnlyLinear
from hal.ops.weight_only import dequantize
from hal.quantization.representation import Tensors
from hal.quantization.scheme import Scheme

GROUP = 32
"""The numbers that share a scale."""
TWICE = (0, 1, 2, 3, 4, 6, 8, 12)
"""Twice the absolute numbers of E2M1, in the order of their three bits. The fourth bit is the sign."""


def numbers_and_scales(blocks: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 numbers, twice those of E2M1, and half of their scales in bfloat16. Both are exact.

    Args:
        blocks: uint8 ``[..., out_features, in_features / 2]``. The low four bits of a byte are the first number.
        exponents: uint8 ``[..., out_features, in_features / 32]``: the scale of 32 numbers is 2 to their power - 127.
    """
    table = torch.tensor([*TWICE, *(-each for each in TWICE)], dtype=torch.int8)
    nibbles = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    scale = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents.int() - 128)
    return table[nibbles.int()], scale.to(torch.bfloat16)


class Mxfp4Experts(Scheme):
    """Float4 weights of experts, in groups of 32."""

    name = "mxfp4"
    summary = "experts in float4 with a power of two as the scale of 32 inputs, held as int8 with the same values"
    expert_biases = True

    def layer(self, linear: Linear) -> WeightOnlyLinear:
        raise ConfigError(
            "mxfp4 is for experts, and config.json quantizes other layers with it",
            "add them to modules_to_not_convert, or load the unquantized checkpoint",
        )

    def grouped_layer(self, linear: GroupedLinear) -> WeightOnlyGroupedLinear:
        if linear.in_features % GROUP:
            raise ConfigError(
                f"experts have {linear.in_features} inputs, not a multiple of {GROUP}",
                "load the unquantized checkpoint",
            )
        settings: dict[str, Any] = {"bits": 8, "group_size": GROUP, "symmetric": True, "fused": linear.fused}
        return WeightOnlyGroupedLinear(linear, **settings)

    def dequantize(self, tensors: Tensors, width: int) -> Tensor:
        weight, scale = tensors["weight"], tensors["weight_scale"]
        assert weight is not None
        assert scale is not None
        return dequantize(weight, scale, None, GROUP)
