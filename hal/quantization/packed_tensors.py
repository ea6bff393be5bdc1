"""Integer weights in groups as compressed-tensors stores them: ``pack-quantized``, and whole in ``int-quantized``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hal.nn import ValueCheck, Weight
from hal.nn.linear import IN, OUT
from hal.ops.forms import Form, pack_int4
from hal.quantization.input_order import group_index, input_order, ordered
from hal.quantization.integer_arithmetic import (
    in_one,
    packed_signed,
    packed_zero_points,
    quantize_groups,
    signed_weight,
    signed_zero_points,
    unsigned,
)
from hal.quantization.stored_layer import FloatLayer, Reader, StoredLayer, Tensors, Writer
from hal.quantization.value_checks import FLOATS, POSITIVE, dimensions, integers

DIMENSIONS = "dimensions"


class WholeTensors(Reader, Writer):
    """``weight``, ``weight_scale``, ``weight_zero_point`` and ``weight_g_idx``, with each number in an int8."""

    def declare(self, stored: StoredLayer) -> Mapping[str, Weight]:
        declare, bits = stored.layer.declare, stored.form.kind.bits
        groups = stored.scales
        checks = (_signed(bits),) if bits < 8 else ()  # any int8 is valid
        zero: dict[str, Any] = {"optional": not stored.form.zero_points, "checks": checks, **groups}
        return {
            "numbers": declare("weight", dtype=torch.int8, every_rank=stored.gathers),
            "scales": declare("weight_scale", stored=FLOATS, checks=(POSITIVE,), **groups),
            "zero_points": declare("weight_zero_point", dtype=torch.int8, **zero),
            "g_idx": group_index(stored, "weight_g_idx", dtype=torch.int64),
        }

    def decode(self, stored: StoredLayer) -> Tensors:
        weight, bits, zero = stored["numbers"], stored.form.kind.bits, stored.tensors.get("zero_points")
        if bits < 8:
            most = 1 << bits - 1
            valid = ((weight >= -most) & (weight < most)).all(-1)
            stored.check_rows(valid, f"{{}}.weight has numbers of more than {bits} bits")
        inputs = input_order(stored, "g_idx", "weight_g_idx")
        weight = stored.by_expert(pack_int4, weight) if bits == 4 else weight
        return {
            "weight": ordered(stored, weight, inputs),
            "weight_scale": stored.of_rank(stored["scales"]),
            "weight_zero_point": None if zero is None else stored.checked_zero_points(stored.of_rank(zero)),
            "bias": stored.tensors.get("bias"),
            **inputs,
        }

    def write(self, layer: FloatLayer, form: Form) -> dict[str, Tensor]:
        numbers, scale, zero = quantize_groups(layer.weight, form, layer.dtype)
        zeros = {} if zero is None else {"weight_zero_point": zero}
        return {"weight": numbers, "weight_scale": scale} | zeros | layer.biases

    def numbers(self, tensors: Mapping[str, Tensor], form: Form, rows: slice) -> Tensor:
        return form.kind.pack(tensors["weight"][rows])


class PackedTensors(Reader, Writer):
    """``weight_packed``, ``weight_scale``, ``weight_zero_point``, ``weight_shape`` and ``weight_g_idx``."""

    def declare(self, stored: StoredLayer) -> Mapping[str, Weight]:
        layer, packed = stored.layer, in_one(stored.form.kind.bits)
        groups = stored.scales
        shape: dict[str, Any] = {"stored": (torch.int64, torch.int32), "optional": True, "dtype": torch.int64}
        shape |= {"sizes": {DIMENSIONS: 2}, "every_rank": True, "checks": (dimensions(layer),)}
        zero: dict[str, Any] = {"packing": {OUT: packed}, "optional": not stored.form.zero_points, **groups}
        return {
            "weight_packed": layer.declare(
                "weight_packed", packing={IN: packed}, dtype=torch.int32, every_rank=stored.gathers
            ),
            "scales": layer.declare("weight_scale", stored=FLOATS, checks=(POSITIVE,), **groups),
            "zero_points": layer.declare("weight_zero_point", dtype=torch.int32, **zero),
            "shape": layer.declare("weight_shape", DIMENSIONS, **shape),
            "g_idx": group_index(stored, "weight_g_idx", dtype=torch.int64),
        }

    def decode(self, stored: StoredLayer) -> Tensors:
        scale, zero, bits = stored["scales"], stored.tensors.get("zero_points"), stored.form.kind.bits
        inputs = input_order(stored, "g_idx", "weight_g_idx")
        width = min(stored.layer.in_features, stored["weight_packed"].shape[-1] * in_one(bits))
        weight = signed_weight(stored["weight_packed"], bits, width)
        if zero is not None:
            zero = unsigned(zero.transpose(-1, -2), bits).transpose(-1, -2)
            zero = signed_zero_points(zero[..., : scale.shape[-2], :], bits)
        return {
            "weight": ordered(stored, weight, inputs),
            "weight_scale": stored.of_rank(scale),
            "weight_zero_point": None if zero is None else stored.checked_zero_points(stored.of_rank(zero)),
            "bias": stored.tensors.get("bias"),
            **inputs,
        }

    def write(self, layer: FloatLayer, form: Form) -> dict[str, Tensor]:
        numbers, scale, zero = quantize_groups(layer.weight, form, layer.dtype)
        found = {
            "weight_packed": packed_signed(numbers, form.kind.bits),
            "weight_scale": scale,
            "weight_shape": torch.tensor(layer.weight.shape),
        }
        zeros = {} if zero is None else {"weight_zero_point": packed_zero_points(zero, form.kind.bits)}
        return found | zeros | layer.biases

    def numbers(self, tensors: Mapping[str, Tensor], form: Form, rows: slice) -> Tensor:
        width = int(tensors["weight_shape"][1])
        return signed_weight(tensors["weight_packed"][rows].clone(), form.kind.bits, width)


def _signed(bits: int) -> ValueCheck:
    return integers(-(1 << bits - 1), (1 << bits - 1) - 1)
