"""Integer weights as compressed-tensors packs them: ``pack-quantized``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from hal.nn import QuantizedLinear, ValueCheck, Weight
from hal.nn.linear import IN, OUT
from hal.nn.low_bits import WeightOnlyTensors
from hal.ops.weight_only import dequantize, pack_int4
from hal.quantization.compressed_tensors import ConfigGroup, differences
from hal.quantization.int8_arithmetic import Activation
from hal.quantization.packed_integers import (
    FLOATS,
    by_expert,
    in_groups,
    in_one,
    input_groups,
    packed_signed,
    quantize_groups,
    signed_weight,
    signed_zero_points,
    unsigned,
)
from hal.quantization.representation import Representation, StoredLayer, Tensors
from hal.quantization.value_checks import POSITIVE, dimensions, group_index, integers

WHOLE = "int-quantized"
"""The format that has each number as an int8."""
PACKED = "pack-quantized"
"""The format that packs numbers into int32."""
INTEGERS = (torch.int64, torch.int32)
DIMENSIONS = "dimensions"


@attrs.frozen
class WeightGroup(ConfigGroup):
    """A group of weights. Activations may be rounded to 8 bits in each token, too, which hal does not do."""

    rounded: ClassVar[Mapping[str, Any]] = {"num_bits": 8, "type": "int", "dynamic": True, "symmetric": True}
    """Keys and values of ``input_activations`` that rounded activations have."""

    def problems(self, group: Mapping[str, Any], name: str, format: Any) -> Iterator[str]:
        """Yield the differences of the checkpoint's group ``name``."""
        yield from super().problems({**group, "input_activations": None}, name, format)
        found = group.get("input_activations")
        if found is None:
            return
        if not isinstance(found, dict):
            yield f"the input_activations of {name} are {found!r:.60}, not a section"
        else:
            yield from differences(found, self.rounded, tuple(found), f"input_activations of {name}")


@attrs.frozen
class FloatGroup(WeightGroup):
    """A group of float8 weights, whose checkpoints mostly have activations in float8, too."""

    rounded: ClassVar[Mapping[str, Any]] = {"num_bits": 8, "type": "float"}

    def has_parts_of(self, group: Mapping[str, Any]) -> bool:
        return True


def packed_group(bits: int) -> WeightGroup:
    """Return the group of weights of so many bits."""
    weights = {"num_bits": bits, "type": "int", "dynamic": False}
    settings = frozenset({"strategy", "group_size", "symmetric", "actorder"})
    return WeightGroup(weights, None, PACKED, settings, (WHOLE,))


def _groups(layer: WeightOnlyTensors) -> tuple[dict[str, Any], Weight]:
    """Return the options of tensors with scales of groups, and the declaration of the group of each input."""
    options = {"group_sizes": {IN: layer.group_size}, "every_rank": layer.any_groups and layer.shard == IN}
    index = layer.declare(
        "weight_g_idx",
        IN,
        every_rank=not layer.any_groups,
        checks=group_index(layer),
        stored=INTEGERS,
        optional=not layer.ordered,
        dtype=torch.int64,
    )
    return options, index


class WholeTensors(Representation):
    """``weight``, ``weight_scale``, ``weight_zero_point`` and ``weight_g_idx``, with each number in an int8."""

    def declare(self, layer: QuantizedLinear) -> Mapping[str, Weight]:
        assert isinstance(layer, WeightOnlyTensors)
        groups, index = _groups(layer)
        checks = (_signed(layer.bits),) if layer.bits < 8 else ()  # any int8 is valid
        zero: dict[str, Any] = {"optional": layer.symmetric, "checks": checks, **groups}
        return {
            "numbers": layer.declare("weight", dtype=torch.int8),
            "scales": layer.declare("weight_scale", stored=FLOATS, checks=(POSITIVE,), **groups),
            "zero_points": layer.declare("weight_zero_point", dtype=torch.int8, **zero),
            "g_idx": index,
        }

    def decode(self, stored: StoredLayer) -> Tensors:
        layer, weight, zero = stored.layer, stored["numbers"], stored.tensors["zero_points"]
        assert isinstance(layer, WeightOnlyTensors)
        if layer.bits < 8:
            most = 1 << layer.bits - 1
            valid = ((weight >= -most) & (weight < most)).all(-1)
            stored.check_rows(valid, f"{{}}.weight has numbers of more than {layer.bits} bits")
        inputs = input_groups(stored, "g_idx", "weight_g_idx")
        weight = by_expert(stored, pack_int4, weight) if layer.bits == 4 else weight
        return {
            **stored.tensors,
            "weight": in_groups(stored, weight, inputs["input_order"]),
            "weight_scale": stored["scales"],
            "weight_zero_point": zero if zero is not None and bool(zero.any()) else None,
            **inputs,
        }

    def write(
        self,
        name: str,
        weight: Tensor,
        bias: Tensor | None,
        activation: Activation | None,
        dtype: torch.dtype,
        settings: Mapping[str, Any],
    ) -> dict[str, Tensor]:
        bits, size = self.description.weights["num_bits"], settings["group_size"] or weight.shape[1]
        numbers, scale = quantize_groups(name, weight, bits, size, dtype)
        return {"weight": numbers, "weight_scale": scale} | ({} if bias is None else {"bias": bias})

    def written_weight(self, tensors: Mapping[str, Tensor], settings: Mapping[str, Any], rows: slice) -> Tensor:
        weight = tensors["weight"][rows]
        return dequantize(weight, tensors["weight_scale"][rows], None, settings["group_size"] or weight.shape[1])


class PackedTensors(Representation):
    """``weight_packed``, ``weight_scale``, ``weight_shape``, ``weight_zero_point`` and ``weight_g_idx``."""

    def declare(self, layer: QuantizedLinear) -> Mapping[str, Weight]:
        assert isinstance(layer, WeightOnlyTensors)
        packed = in_one(layer.bits)
        groups, index = _groups(layer)
        rest: dict[str, Any] = {"stored": INTEGERS, "optional": True, "dtype": torch.int64}
        zero: dict[str, Any] = {"packing": {OUT: packed}, "optional": layer.symmetric, **groups}
        return {
            "weight_packed": layer.declare("weight_packed", packing={IN: packed}, dtype=torch.int32),
            "scales": layer.declare("weight_scale", stored=FLOATS, checks=(POSITIVE,), **groups),
            "zero_points": layer.declare("weight_zero_point", dtype=torch.int32, **zero),
            "shape": layer.declare(
                "weight_shape", DIMENSIONS, sizes={DIMENSIONS: 2}, every_rank=True, checks=(dimensions(layer),), **rest
            ),
            "g_idx": index,
        }

    def decode(self, stored: StoredLayer) -> Tensors:
        layer, scale, zero = stored.layer, stored["scales"], stored.tensors["zero_points"]
        assert isinstance(layer, WeightOnlyTensors)
        inputs = input_groups(stored, "g_idx", "weight_g_idx")
        width = min(layer.in_features, stored["weight_packed"].shape[-1] * in_one(layer.bits))
        weight = signed_weight(stored["weight_packed"], layer.bits, width)
        if zero is not None:
            zero = unsigned(zero.transpose(-1, -2), layer.bits).transpose(-1, -2)
            zero = signed_zero_points(zero[..., : scale.shape[-2], :], layer.bits)
        return {
            **stored.tensors,
            "weight": in_groups(stored, weight, inputs["input_order"]),
            "weight_scale": scale,
            "weight_zero_point": zero,
            **inputs,
        }

    def write(
        self,
        name: str,
        weight: Tensor,
        bias: Tensor | None,
        activation: Activation | None,
        dtype: torch.dtype,
        settings: Mapping[str, Any],
    ) -> dict[str, Tensor]:
        bits, size = self.description.weights["num_bits"], settings["group_size"] or weight.shape[1]
        numbers, scale = quantize_groups(name, weight, bits, size, dtype)
        found = {
            "weight_packed": packed_signed(numbers, bits),
            "weight_scale": scale,
            "weight_shape": torch.tensor(weight.shape),
        }
        return found | ({} if bias is None else {"bias": bias})

    def written_weight(self, tensors: Mapping[str, Tensor], settings: Mapping[str, Any], rows: slice) -> Tensor:
        bits, width = self.description.weights["num_bits"], int(tensors["weight_shape"][1])
        weight = signed_weight(tensors["weight_packed"][rows].clone(), bits, width)
        return dequantize(weight, tensors["weight_scale"][rows], None, settings["group_size"] or width)


def _signed(bits: int) -> ValueCheck:
    return integers(-(1 << bits - 1), (1 << bits - 1) - 1)
