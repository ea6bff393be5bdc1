"""The format of GPTQ: integers packed along the inputs, with ``quant_method`` ``gptq`` in config.json.

Source: the documentation of GPTQModel; version 1 stores zero points minus one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from hal.errors import ConfigError
from hal.nn import QuantizedLinear, ValueCheck, Weight
from hal.nn.linear import IN, OUT
from hal.nn.low_bits import WeightOnlyTensors
from hal.quantization.checkpoint_format import CheckpointFormat, ConfigSection, Quantization
from hal.quantization.excluded_layers import ExcludedLayers
from hal.quantization.int8_arithmetic import AGAIN
from hal.quantization.packed_integers import (
    FLOATS,
    by_expert,
    in_groups,
    in_one,
    input_groups,
    signed_weight,
    signed_zero_points,
    transposed,
    unsigned,
)
from hal.quantization.representation import Representation, StoredLayer, Tensors
from hal.quantization.value_checks import POSITIVE, group_index

VERSIONS = ("gptq", "gptq_v2")
SCHEMES = {4: "w4a16", 8: "w8a16_group"}


class GptqTensors(Representation):
    """``qweight``, ``qzeros``, ``scales`` and ``g_idx``."""

    def declare(self, layer: QuantizedLinear) -> Mapping[str, Weight]:
        assert isinstance(layer, WeightOnlyTensors)
        axes, packed = f"{IN} {OUT}", in_one(layer.bits)
        if layer.in_features % packed:
            raise ConfigError(
                f"a layer has {layer.in_features} inputs, and GPTQ packs {packed} of {layer.bits} bits into a number",
                "exclude the layer when you quantize",
            )
        groups: dict[str, Any] = {
            "group_sizes": {IN: layer.group_size},
            "every_rank": layer.any_groups and layer.shard == IN,
        }
        zero: dict[str, Any] = {"packing": {OUT: packed}, "dtype": torch.int32, "checks": self._zero_points(layer.bits)}
        index: dict[str, Any] = {
            "optional": not layer.ordered,
            "dtype": torch.int32,
            "stored": (torch.int32, torch.int64),
        }
        return {
            "qweight": layer.declare("qweight", axes, packing={IN: packed}, dtype=torch.int32),
            "qzeros": layer.declare("qzeros", axes, **groups, **zero),
            "scales": layer.declare("scales", axes, stored=FLOATS, checks=(POSITIVE,), **groups),
            "g_idx": layer.declare("g_idx", IN, every_rank=not layer.any_groups, checks=group_index(layer), **index),
        }

    def decode(self, stored: StoredLayer) -> Tensors:
        layer = stored.layer
        assert isinstance(layer, WeightOnlyTensors)
        bits, scale = layer.bits, by_expert(stored, transposed, stored["scales"])
        inputs = input_groups(stored, "g_idx", "g_idx")
        packed = by_expert(stored, transposed, stored["qweight"])
        zero = by_expert(stored, lambda each: transposed(unsigned(each, bits).to(torch.uint8)), stored["qzeros"])
        if self.description == VERSIONS[0]:
            zero = zero + 1
        weight = signed_weight(packed, bits, packed.shape[-1] * in_one(bits))
        return {
            **stored.tensors,
            "weight": in_groups(stored, weight, inputs["input_order"]),
            "weight_scale": scale,
            "weight_zero_point": signed_zero_points(zero, bits),
            **inputs,
        }

    def _zero_points(self, bits: int) -> tuple[ValueCheck, ...]:
        """Return the rule for zero points: version 1 adds 1 to them. In version 2, any is valid."""

        def holds(packed: Tensor) -> bool:
            return bool((unsigned(packed, bits) < (1 << bits) - 1).all())

        rule = ValueCheck(holds, f"has zero points of {1 << bits}, beyond {bits} bits", AGAIN)
        return (rule,) if self.description == VERSIONS[0] else ()


class Gptq(CheckpointFormat):
    """The format of GPTQ, in its first version."""

    name = "gptq"
    representations = MappingProxyType(dict.fromkeys(SCHEMES.values(), GptqTensors(VERSIONS[0])))

    def read(self, folder: Path, section: ConfigSection | None) -> Quantization | None:
        if section is None or section.content.get("quant_method") != "gptq":
            return None
        content, where = section.content, section.name
        version = content.get("checkpoint_format") or content.get("format") or VERSIONS[0]
        if version not in VERSIONS:
            raise ConfigError(
                f"{where} has the checkpoint_format {version!r:.60}, which hal does not support",
                f"use a checkpoint in {' or '.join(VERSIONS)}",
            )
        if version != self.version:
            return None
        bits = content.get("bits")
        if type(bits) is not int or bits not in SCHEMES:
            raise ConfigError(
                f"{where} has weights of {bits!r:.60} bits, which hal does not support", "use 4 or 8 bits"
            )
        if dynamic := content.get("dynamic"):
            raise ConfigError(
                f"{where} has rules for single layers (dynamic), {dynamic!r:.80}, which hal does not support",
                "use a checkpoint whose layers are quantized alike",
            )
        scheme, _ = self.known()[SCHEMES[bits]]
        settings: dict[str, Any] = {"group_size": content.get("group_size"), "symmetric": content.get("sym", True)}
        settings["actorder"] = "group" if content.get("desc_act") else None
        return ExcludedLayers(scheme.configured(settings), content.get("modules_to_not_convert"), where)

    @property
    def version(self) -> str:
        """The version that it reads."""
        found: str = self.representations["w4a16"].description
        return found


class GptqV2(Gptq):
    """The format of GPTQ in its second version, with unchanged zero points."""

    name = "gptq_v2"
    representations = MappingProxyType(dict.fromkeys(SCHEMES.values(), GptqTensors(VERSIONS[1])))
