"""The format of AWQ: 4-bit integers packed along the outputs, with ``quant_method`` ``awq`` in config.json.

Source: the documentation of AutoAWQ, of its version ``gemm``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from hal.errors import ConfigError
from hal.nn import Weight
from hal.nn.linear import IN, OUT
from hal.ops.forms import INT4S, Form
from hal.quantization.checkpoint_format import CheckpointFormat, ConfigSection, Quantization
from hal.quantization.forms import in_groups
from hal.quantization.integer_arithmetic import (
    packed_signed,
    quantize_groups,
    signed_weight,
    signed_zero_points,
    transposed,
    unsigned,
)
from hal.quantization.layer_patterns import ExcludedLayers
from hal.quantization.stored_layer import FloatLayer, Reader, StoredAs, StoredLayer, Tensors, Writer
from hal.quantization.value_checks import FLOATS, POSITIVE

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place of each of eight outputs in an int32."""
BITS = 4
UNPACKED = 1 << 18
"""The numbers that are unpacked at once."""


class AwqTensors(Reader, Writer):
    """``qweight``, ``qzeros`` and ``scales``."""

    def declare(self, stored: StoredLayer) -> Mapping[str, Weight]:
        axes, declare, eight = f"{IN} {OUT}", stored.layer.declare, {OUT: INT4S}
        return {
            "qweight": declare("qweight", axes, packing=eight, dtype=torch.int32),
            "qzeros": declare("qzeros", axes, packing=eight, dtype=torch.int32, **stored.scales),
            "scales": declare("scales", axes, stored=FLOATS, checks=(POSITIVE,), **stored.scales),
        }

    def decode(self, stored: StoredLayer) -> Tensors:
        zero = stored.by_expert(_zero_points, stored["qzeros"])
        return {
            "weight": stored.by_expert(_weight, stored["qweight"]),
            "weight_scale": stored.of_rank(stored.by_expert(transposed, stored["scales"])),
            "weight_zero_point": stored.checked_zero_points(stored.of_rank(zero)),
            "bias": stored.tensors.get("bias"),
        }

    def write(self, layer: FloatLayer, form: Form) -> dict[str, Tensor]:
        numbers, scale, zero = quantize_groups(layer.weight, form, layer.dtype)
        zero = torch.zeros_like(scale, dtype=torch.int8) if zero is None else zero
        found = {"qweight": _packed(numbers), "qzeros": _packed(zero), "scales": transposed(scale)}
        return found | layer.biases


READER = AwqTensors()


class Awq(CheckpointFormat):
    """The format of AWQ."""

    name = "awq"

    def read(self, folder: Path, section: ConfigSection | None) -> Quantization | None:
        if section is None or section.content.get("quant_method") != self.name:
            return None
        for names, supported in (
            (("bits", "w_bit"), (BITS,)),
            (("version", "format", "checkpoint_format"), ("gemm",)),
            (("zero_point",), (True, False)),
        ):
            found = section.value(*names, default=supported[0])
            if not any(found == each and type(found) is type(each) for each in supported):
                raise ConfigError(
                    f"{section.name} has {names[0]} {found!r:.60}, which hal does not support in AWQ",
                    f"use a checkpoint with {names[0]} {supported[0]!r}",
                )
        symmetric = not section.value("zero_point", default=True)
        if (stated := section.value("sym")) is not None and stated != symmetric:
            raise ConfigError(
                f"{section.name} has zero_point {not symmetric} and sym {stated!r:.60}, which contradict each other",
                "remove the wrong one, or download the checkpoint again",
            )
        size = section.value("group_size", "q_group_size")
        form = in_groups(Form("int4"), {"group_size": size, "symmetric": symmetric})
        return ExcludedLayers(StoredAs(form, READER), section.lists("modules_to_not_convert"))


def _zero_points(qzeros: Tensor) -> Tensor:
    """Return zero points, int8 ``[out_features, groups]``, from int32 ``[groups, out_features / 8]``."""
    return signed_zero_points(unsigned(qzeros, BITS, ORDER).t(), BITS)


def _packed(numbers: Tensor) -> Tensor:
    """Return int8 ``[out_features, columns]`` as int32 ``[columns, out_features / 8]``."""
    places = torch.tensor(ORDER).argsort()  # the output in each place
    return packed_signed(numbers.unflatten(0, (-1, INT4S))[:, places].flatten(0, 1).t(), BITS)


def _weight(qweight: Tensor) -> Tensor:
    """Return a weight, some outputs after the others, to use less memory.

    Args:
        qweight: int32 ``[in_features, out_features / 8]``.
    """
    width, eighth = qweight.shape
    found = qweight.new_empty(eighth * INT4S, width // INT4S)
    step = max(1, UNPACKED // (INT4S * max(1, width)))
    for rows, part in zip(found.view(torch.uint8).split(step * INT4S), qweight.t().split(step), strict=True):
        own = part.contiguous()
        for output, place in enumerate(ORDER):
            numbers = (own >> BITS * place & 15).to(torch.uint8)
            rows[output::INT4S] = numbers[:, ::2] | numbers[:, 1::2] << BITS
    return signed_weight(found, BITS, width)
