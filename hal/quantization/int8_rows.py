"""Int8 weights with a scale for each row, as compressed-tensors and ModelSlim store them, and static inputs.

Source: the documentation of both formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from hal.errors import CheckpointError
from hal.nn import ValueCheck, Weight
from hal.nn.linear import OUT
from hal.ops.forms import Form
from hal.quantization.integer_arithmetic import (
    AGAIN,
    INT32_MAX,
    Activation,
    activation_for,
    bias_counts,
    int8_row_sums,
    quantize_weight,
)
from hal.quantization.stored_layer import CalibratedWriter, FloatLayer, Reader, StoredLayer, Tensors, Writer
from hal.quantization.value_checks import NOT_NEGATIVE, NUMBERS, POSITIVE, SYMMETRIC, integers

RESULT_SCALES = (
    ValueCheck(
        lambda values: values.dtype != torch.int64 or bool(((values >= 0) & (values < 1 << 32)).all()),
        "is I64, with values that are not float32 bit patterns",
        AGAIN,
    ),
    ValueCheck(lambda values: NOT_NEGATIVE.holds(as_float32(values)), NOT_NEGATIVE.problem, NOT_NEGATIVE.remedy),
)
"""The rules for scales of results: float32, or its bits in int64."""


class Int8Rows(Reader, Writer):
    """``weight``, ``weight_scale``, and zero points, which must be 0 if there are any.

    Args:
        zero_point: the name of the zero points.
        writes_zero_point: whether the format requires them.
    """

    def __init__(self, zero_point: str, *, writes_zero_point: bool = False) -> None:
        self.zero_point, self.writes_zero_point = zero_point, writes_zero_point

    def declare(self, stored: StoredLayer) -> Mapping[str, Weight]:
        given: dict[str, Any] = {"dtype": torch.float32, "column": True}
        declare = stored.layer.declare
        return {
            "weight": declare("weight", dtype=torch.int8),
            "weight_scale": declare("weight_scale", OUT, checks=(NOT_NEGATIVE,), **given),
            self.zero_point: declare(self.zero_point, OUT, stored=NUMBERS, optional=True, checks=(SYMMETRIC,), **given),
        }

    def decode(self, stored: StoredLayer) -> Tensors:
        scale = stored["weight_scale"]
        check_rows_of_zeros(stored, scale)
        return {"weight": stored["weight"], "weight_scale": scale.unsqueeze(-1), "bias": stored.tensors.get("bias")}

    def write(self, layer: FloatLayer, form: Form) -> dict[str, Tensor]:
        values, scale = quantize_weight(layer.name, layer.weight)
        found = {"weight": values, "weight_scale": scale.unsqueeze(-1)} | layer.biases
        return found | ({self.zero_point: torch.zeros_like(scale).unsqueeze(-1)} if self.writes_zero_point else {})


def check_rows_of_zeros(stored: StoredLayer, scale: Tensor) -> None:
    """Raise CheckpointError if a row has the scale 0 and other numbers."""
    if bool((scale == 0).any()):
        used = stored["weight"].any(-1).to(scale.device)
        stored.check_rows((scale != 0) | ~used, "a row of {} has the scale 0, and other numbers")


class StaticRows(Int8Rows, CalibratedWriter):
    """Int8 rows, and a scale and an offset of the input of each part.

    A subclass returns from :meth:`results`, for the input's scale of the row's own part and without the contribution of
    the offset, the scales of results, and the bias in units of them, float64.

    Args:
        zero_point: see :class:`Int8Rows`.
        offset: the name of the input's offset.
        requires_offset: whether the checkpoint must have it.
        writes_zero_point: see :class:`Int8Rows`.
    """

    def __init__(
        self, zero_point: str, offset: str, *, requires_offset: bool = False, writes_zero_point: bool = False
    ) -> None:
        super().__init__(zero_point, writes_zero_point=writes_zero_point)
        self.offset, self.requires_offset = offset, requires_offset
        self.of_inputs = ("input_scale", offset)

    def declare(self, stored: StoredLayer) -> Mapping[str, Weight]:
        # Each rank has those of all experts, because it takes the largest scale.
        given: dict[str, Any] = {"dtype": torch.float32, "every_rank": True, "column": True}
        declare, optional = stored.layer.declare, not self.requires_offset
        return {
            **super().declare(stored),
            "input_scale": declare("input_scale", "", checks=(POSITIVE,), **given),
            self.offset: declare(
                self.offset, "", stored=NUMBERS, optional=optional, checks=(integers(-128, 127),), **given
            ),
        }

    def results(self, stored: StoredLayer, offset: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the scales of results, the bias in units of them, and the sums of the weight's rows or None."""
        scale = stored["weight_scale"] * stored.rows_of(stored["input_scale"], stored["weight"])
        bias = stored.tensors.get("bias")
        return scale, torch.zeros_like(scale) if bias is None else bias_counts(bias, scale), None

    def decode(self, stored: StoredLayer) -> Tensors:
        scales, given = stored["input_scale"], stored.tensors.get(self.offset)
        offsets = (torch.zeros_like(scales) if given is None else given).flatten().tolist()
        offset = int(_alike(stored, offsets))
        deq_scale, counts, sums = self.results(stored, torch.zeros_like(scales) if given is None else given)
        scale, width = scales.max(), stored["weight"].shape[-1]
        # The weights' scales stay. The scale and the bias of each row are converted to the larger unit.
        ratio = stored.rows_of(scales, stored["weight"]).double() / scale.double()
        deq_scale, counts = (deq_scale.double() / ratio).float(), counts * ratio
        stored.check_rows(deq_scale.isfinite(), "the scales of {} are too large for float32")
        check_rows_of_zeros(stored, deq_scale)
        bias = counts.round()
        if offset:
            bias -= offset * (int8_row_sums(stored["weight"]) if sums is None else sums)
        stored.check_rows(bias.abs() <= INT32_MAX, "the bias of {} does not fit into 32 bits in units of its scale")
        return {
            "weight": stored["weight"],
            "weight_scale": deq_scale.unsqueeze(-1),
            "bias": bias.to(torch.int32) if bool(bias.any()) else None,
            "input_scale": scale.expand(width).clone(),
            "input_offset": torch.full((width,), offset, dtype=torch.int32) if offset else None,
        }


def _alike(stored: StoredLayer, offsets: list[float]) -> float:
    """Return the offset of a layer's input.

    Raises:
        CheckpointError: its parts have different ones.
    """
    if len({*offsets}) > 1:
        found = ", ".join(f"{int(offset)} of {name}" for name, offset in zip(stored.names, offsets, strict=True))
        raise CheckpointError(
            f"layers that are merged into one have different input offsets: {found}",
            "quantize them together, with symmetric activations, whose offset is 0, or with w8a8_dynamic",
        )
    return offsets[0]


class CompressedStatic(StaticRows):
    """The tensors of compressed-tensors: a scale per row, and a floating-point bias.

    Args:
        symmetric: whether the description says that offsets are 0.
    """

    def __init__(self, zero_point: str, *, symmetric: bool = True) -> None:
        super().__init__(zero_point, "input_zero_point")
        self.symmetric = symmetric

    def declare(self, stored: StoredLayer) -> Mapping[str, Weight]:
        found = dict(super().declare(stored))
        if stored.layer.biased:
            found["bias"] = stored.layer.declare("bias", OUT, dtype=torch.float32, added=True)
        return found

    def decode(self, stored: StoredLayer) -> Tensors:
        offset = stored.tensors.get(self.offset)
        if self.symmetric and offset is not None and bool(offset.any()):
            found = zip(stored.names, offset.flatten().tolist(), strict=True)
            name, value = next(pair for pair in found if pair[1])
            raise CheckpointError(
                f"{name} has the input_zero_point {int(value)}, but activations are described as symmetric", AGAIN
            )
        return super().decode(stored)

    def activation(self, low: float, high: float, dtype: torch.dtype) -> Activation:
        """Return a symmetric activation, as llm-compressor."""
        return activation_for(low, high, symmetric=True)

    def write(self, layer: FloatLayer, form: Form) -> dict[str, Tensor]:
        activation = layer.activation
        assert activation is not None
        found = super().write(layer, form)
        found["input_scale"] = torch.tensor([activation.scale], dtype=torch.float32)
        if activation.offset:
            found["input_zero_point"] = torch.tensor([activation.offset], dtype=torch.int8)
        return found


class ModelSlimStatic(StaticRows):
    """The tensors of ModelSlim: a scale of each row's results, and an integer bias with the offset's part."""

    needs_bias = True

    def __init__(self, zero_point: str) -> None:
        super().__init__(zero_point, "input_offset", requires_offset=True, writes_zero_point=True)

    def declare(self, stored: StoredLayer) -> Mapping[str, Weight]:
        scales = (torch.float32, torch.bfloat16, torch.int64)
        redundant: dict[str, Any] = {"dtype": torch.float32, "optional": True, "column": True}
        declare = stored.layer.declare
        return {
            **super().declare(stored),
            "deq_scale": declare("deq_scale", OUT, stored=scales, column=True, checks=RESULT_SCALES),
            "quant_bias": declare("quant_bias", OUT, dtype=torch.int32, column=True, added=True),
            # The three above are more precise than these.
            "weight_scale": declare("weight_scale", OUT, **redundant),
            "bias": declare("bias", OUT, **redundant),
        }

    def results(self, stored: StoredLayer, offset: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        counts, sums = stored["quant_bias"].double(), int8_row_sums(stored["weight"])
        return (
            as_float32(stored["deq_scale"]).float(),
            counts + stored.rows_of(offset.long(), stored["weight"]) * sums,
            sums,
        )

    def activation(self, low: float, high: float, dtype: torch.dtype) -> Activation:
        """Return an activation with an offset, as ModelSlim."""
        return activation_for(low, high, symmetric=False, dtype=dtype)

    def write(self, layer: FloatLayer, form: Form) -> dict[str, Tensor]:
        activation, bias, dtype = layer.activation, layer.bias, layer.dtype
        assert activation is not None
        found = super().write(attrs.evolve(layer, bias=None), form)
        deq_scale = found["weight_scale"].flatten().float() * torch.tensor(activation.scale, dtype=torch.float32)
        counts = torch.zeros_like(deq_scale) if bias is None else bias_counts(bias, deq_scale)
        found["input_scale"] = torch.tensor([activation.scale], dtype=dtype)
        found["input_offset"] = torch.tensor([activation.offset], dtype=dtype)
        found["quant_bias"] = (counts.round().long() - activation.offset * int8_row_sums(found["weight"])).int()
        # float16 kernels take the bits as int64.
        found["deq_scale"] = deq_scale.view(torch.int32).long() if dtype == torch.float16 else deq_scale
        return found


def as_float32(scale: Tensor) -> Tensor:
    """Return scales, of which int64 ones are the bits of float32."""
    return scale.to(torch.int32).view(torch.float32) if scale.dtype == torch.int64 else scale
