"""Float8 weights with scales as checkpoints store them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from hal.errors import CheckpointError
from hal.nn import QuantizedLinear, Weight
from hal.nn.linear import IN, OUT
from hal.nn.low_bits import Fp8Tensors
from hal.quantization.int8_arithmetic import Activation
from hal.quantization.representation import Representation, StoredLayer, Tensors
from hal.quantization.schemes.scaled_rows import NUMBERS
from hal.quantization.schemes.w8a8 import rows_of
from hal.quantization.value_checks import POSITIVE

SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)


class Fp8Scales(Representation):
    """``weight``, and its scales as blocks, output channels or a number.

    Args:
        description: see :class:`Representation`.
        names: the name of the tensor of the scales of blocks, and of others.
    """

    def __init__(self, description: object, names: tuple[str, str]) -> None:
        super().__init__(description)
        self._names = names

    def name(self, layer: Fp8Tensors) -> str:
        """Return the name of the tensor of the scales."""
        return self._names[layer.strategy != "block"]

    def declare(self, layer: QuantizedLinear) -> Mapping[str, Weight]:
        assert isinstance(layer, Fp8Tensors)
        name: str = self.name(layer)
        scales: dict[str, Any] = {"dtype": torch.float32, "stored": SCALES, "checks": (POSITIVE,)}
        if layer.strategy == "block":
            blocks = {OUT: layer.block[0], IN: layer.block[1]}
            of_all = None if layer.fused is None else f"{layer.fused}_{name.removeprefix('weight_')}"
            scale = layer.declare(name, fused=of_all, group_sizes=blocks, **scales)
            if layer.fused is not None:
                values = layer.declare("weight", fused=layer.fused, dtype=torch.float8_e4m3fn)
                return {"values": values, "scales": scale}
        elif layer.strategy == "channel":
            scale = layer.declare(name, OUT, column=True, **scales)
        else:
            scale = layer.declare(name, "", every_rank=True, column=True, **scales)
        # Static scales of activations, which stay floating-point.
        given: dict[str, Any] = {
            "dtype": torch.float32,
            "stored": NUMBERS,
            "optional": True,
            "every_rank": True,
            "column": True,
        }
        return {
            "values": layer.declare("weight", dtype=torch.float8_e4m3fn),
            "scales": scale,
            "input_scale": layer.declare("input_scale", "", **given),
        }

    def decode(self, stored: StoredLayer) -> Tensors:
        layer, scale = stored.layer, stored["scales"]
        assert isinstance(layer, Fp8Tensors)
        weight = stored["values"].view(torch.uint8)
        stored = attrs.evolve(stored, tensors={**stored.tensors, "weight": weight})
        if layer.strategy == "tensor":
            scale = rows_of(stored, scale)
        if layer.strategy != "block":
            scale = scale.unsqueeze(-1)
        return {**stored.tensors, "weight_scale": scale}


class CompressedFp8(Fp8Scales):
    """The same in compressed-tensors, which hal writes with a scale for each row."""

    def write(
        self,
        name: str,
        weight: Tensor,
        bias: Tensor | None,
        activation: Activation | None,
        dtype: torch.dtype,
        settings: Mapping[str, Any],
    ) -> dict[str, Tensor]:
        """Quantize a layer with a scale for each row: ``max|row| / 448``."""
        wide = weight.float()
        largest = wide.abs().amax(-1, keepdim=True)
        if not bool(largest.isfinite().all()):
            raise CheckpointError(f"{name} has values that are not finite", "use a checkpoint with finite weights")
        scale = torch.where(largest == 0, 1.0, largest / torch.finfo(torch.float8_e4m3fn).max)
        found = {"weight": (wide / scale).to(torch.float8_e4m3fn), "weight_scale": scale}
        return found | ({} if bias is None else {"bias": bias})
