"""The format of GPTQ: integers packed along the inputs, with ``quant_method`` ``gptq`` in config.json.

Source: the documentation of GPTQModel; version 1 stores zero points minus one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import attrs
import torch
from torch import Tensor

from hal.errors import CheckpointError, ConfigError
from hal.nn import Weight
from hal.nn.linear import IN, OUT
from hal.ops.forms import Form
from hal.quantization.checkpoint_format import CheckpointFormat, ConfigSection, Quantization
from hal.quantization.forms import in_groups
from hal.quantization.input_order import group_index, input_order, ordered
from hal.quantization.integer_arithmetic import (
    AGAIN,
    in_one,
    packed_signed,
    quantize_groups,
    signed_weight,
    signed_zero_points,
    transposed,
    unsigned,
)
from hal.quantization.layer_patterns import ExcludedLayers, LayerPattern, LayerRule
from hal.quantization.stored_layer import FloatLayer, Reader, StoredAs, StoredLayer, Tensors, Writer
from hal.quantization.value_checks import FLOATS, POSITIVE

VERSIONS = ("gptq", "gptq_v2")
NUMBERS = {4: Form("int4"), 8: Form("int8")}


@attrs.frozen(slots=False)
class GptqTensors(Reader, Writer):
    """``qweight``, ``qzeros``, ``scales`` and ``g_idx``.

    Attributes:
        version: that of the format.
    """

    version: str

    def declare(self, stored: StoredLayer) -> Mapping[str, Weight]:
        axes, packed, declare = f"{IN} {OUT}", in_one(stored.form.kind.bits), stored.layer.declare
        groups = stored.scales
        return {
            "qweight": declare("qweight", axes, packing={IN: packed}, dtype=torch.int32, every_rank=stored.gathers),
            "qzeros": declare("qzeros", axes, packing={OUT: packed}, dtype=torch.int32, **groups),
            "scales": declare("scales", axes, stored=FLOATS, checks=(POSITIVE,), **groups),
            "g_idx": group_index(stored, "g_idx", dtype=torch.int32),
        }

    def decode(self, stored: StoredLayer) -> Tensors:
        bits, inputs = stored.form.kind.bits, input_order(stored, "g_idx", "g_idx")
        packed = stored.by_expert(transposed, stored["qweight"])
        zero = stored.by_expert(lambda each: transposed(unsigned(each, bits).to(torch.uint8)), stored["qzeros"])
        # Version 1 stores the largest number for 0. Some of its files with symmetric weights store the middle as it is.
        as_it_is = not stored.form.zero_points and bool((zero == 1 << bits - 1).all())
        if self.version == VERSIONS[0] and not as_it_is:
            zero = zero + 1 & (1 << bits) - 1
        width = min(stored.layer.in_features, packed.shape[-1] * in_one(bits))
        weight = signed_weight(packed, bits, width)
        return {
            "weight": ordered(stored, weight, inputs),
            "weight_scale": stored.of_rank(stored.by_expert(transposed, stored["scales"])),
            "weight_zero_point": stored.checked_zero_points(stored.of_rank(signed_zero_points(zero, bits))),
            "bias": stored.tensors.get("bias"),
            **inputs,
        }

    def write(self, layer: FloatLayer, form: Form) -> dict[str, Tensor]:
        bits, width = form.kind.bits, layer.weight.shape[1]
        numbers, scale, zero = quantize_groups(layer.weight, form, layer.dtype)
        zero = torch.zeros_like(scale, dtype=torch.int8) if zero is None else zero
        return {
            "qweight": transposed(packed_signed(numbers, bits)),
            "qzeros": packed_signed((zero - int(self.version == VERSIONS[0])).t(), bits),
            "scales": transposed(scale),
            "g_idx": torch.arange(width, dtype=torch.int32) // form.group(width),
        } | layer.biases


class Gptq(CheckpointFormat):
    """The format of GPTQ."""

    name = "gptq"

    def read(self, folder: Path, section: ConfigSection | None) -> Quantization | None:
        if section is None or section.content.get("quant_method") != self.name:
            return None
        if (rotation := section.value("rotation")) is not None:
            problem = f"{section.name} has the rotation {rotation!r:.60}, which hal does not support"
            raise ConfigError(problem, "use a checkpoint that was quantized without rotation")
        lists = section.lists("modules_to_not_convert")
        return ExcludedLayers(self._stored_as(section), lists, [*self._rules(section)])

    def _stored_as(self, section: ConfigSection) -> StoredAs:
        bits, version = section.value("bits"), section.value("checkpoint_format", "format", default=VERSIONS[0])
        if version not in VERSIONS:
            raise ConfigError(
                f"{section.name} has the checkpoint_format {version!r:.60}, which hal does not support",
                f"use a checkpoint in {' or '.join(VERSIONS)}",
            )
        if type(bits) is not int or bits not in NUMBERS:
            raise ConfigError(
                f"{section.name} has weights of {bits!r:.60} bits, which hal does not support", "use 4 or 8 bits"
            )
        # Without sym, the stored zero points say whether weights are symmetric.
        settings = {"group_size": section.value("group_size"), "symmetric": section.value("sym", default=False)}
        settings["actorder"] = "group" if section.value("desc_act") else None
        return StoredAs(in_groups(NUMBERS[bits], settings), GptqTensors(version))

    def _rules(self, section: ConfigSection) -> Iterator[LayerRule]:
        dynamic = section.value("dynamic", default={}) or {}
        if not isinstance(dynamic, dict):
            raise CheckpointError(f"dynamic of {section.name} is {dynamic!r:.60}, not a table of rules", AGAIN)
        for key, changes in dynamic.items():
            where = f"{key!r:.80} in dynamic of {section.name}"
            pattern = LayerPattern(key.removeprefix("-:").removeprefix("+:"), f"dynamic of {section.name}")
            if key.startswith("-:"):
                yield LayerRule(pattern, where, None)
                continue
            if not isinstance(changes, dict):
                raise CheckpointError(f"the rule {where} is {changes!r:.60}, not a table", AGAIN)
            own = ConfigSection(f"the rule {where}", {**section.content, **changes})
            yield LayerRule(pattern, where, partial(self._stored_as, own))
