"""``w8a8``: int8 weights with a scale per row, and int8 activations with a fixed scale and offset per layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from hal.errors import CheckpointError
from hal.nn import GroupedLinear, Linear, QuantizedLinear, ValueCheck, Weight
from hal.nn.linear import OUT
from hal.nn.quantized_experts import StaticQuantizedGroupedLinear
from hal.nn.quantized_linear import StaticQuantizedLinear
from hal.quantization.compressed_tensors import CHANNEL_WEIGHTS, COMPRESSED_TENSORS, ConfigGroup
from hal.quantization.int8_arithmetic import (
    AGAIN,
    INT32_MAX,
    Activation,
    activation_for,
    bias_counts,
    int8_row_sums,
)
from hal.quantization.modelslim import MODELSLIM
from hal.quantization.representation import StoredLayer, Tensors
from hal.quantization.scheme import Scheme
from hal.quantization.schemes.scaled_rows import (
    NUMBERS,
    CompressedRows,
    ModelSlimRows,
    SymmetricRows,
    check_rows_of_zeros,
)
from hal.quantization.value_checks import NOT_NEGATIVE, POSITIVE, integers

TENSOR = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False}
"""Int8 activations with a scale of a tensor, symmetric or not."""
RESULT_SCALES = (
    ValueCheck(
        lambda values: values.dtype != torch.int64 or bool(((values >= 0) & (values < 1 << 32)).all()),
        "is I64, with values that are not float32 bit patterns",
        AGAIN,
    ),
    ValueCheck(lambda values: NOT_NEGATIVE.holds(as_float32(values)), NOT_NEGATIVE.problem, NOT_NEGATIVE.remedy),
)
"""The rules for scales of results: float32, or its bits in int64."""


class StaticInput(SymmetricRows):
    """Int8 rows, and a scale and an offset of the input of each part.

    :meth:`decode` returns, beside these, ``deq_scale``, and the bias in units of it as ``counts``, float64: both for
    the input's scale of the row's own part, and without the contribution of the offset. It may return the weight's
    ``row_sums``, too.

    Attributes:
        offset: the tensor of the input's offset.
        requires_offset: whether the checkpoint must have it.
    """

    offset: ClassVar[str]
    requires_offset: ClassVar[bool]

    def declare(self, layer: QuantizedLinear) -> Mapping[str, Weight]:
        # Each rank has those of all experts, because it takes the largest scale.
        given: dict[str, Any] = {"dtype": torch.float32, "every_rank": True, "column": True}
        return {
            **super().declare(layer),
            "input_scale": layer.declare("input_scale", "", checks=(POSITIVE,), **given),
            self.offset: layer.declare(
                self.offset,
                "",
                stored=NUMBERS,
                optional=not self.requires_offset,
                checks=(integers(-128, 127),),
                **given,
            ),
        }

    def decode(self, stored: StoredLayer) -> Tensors:
        scale, offset = stored["input_scale"], stored.tensors[self.offset]
        offset = torch.zeros_like(scale) if offset is None else offset
        return {**super().decode(stored), "input_scale": scale, "input_offset": offset.long()}


class CompressedStatic(StaticInput, CompressedRows):
    """The tensors of compressed-tensors: a scale per row, and a floating-point bias."""

    offset, requires_offset = "input_zero_point", False

    def declare(self, layer: QuantizedLinear) -> Mapping[str, Weight]:
        found = {**super().declare(layer)}
        if layer.has_bias:
            found["bias"] = layer.declare("bias", OUT, dtype=torch.float32, added=True)
        return found

    def decode(self, stored: StoredLayer) -> Tensors:
        found = super().decode(stored)
        deq_scale = stored["weight_scale"] * rows_of(stored, stored["input_scale"])
        bias = stored.tensors.get("bias")
        counts = torch.zeros_like(deq_scale) if bias is None else bias_counts(bias, deq_scale)
        return {**found, "deq_scale": deq_scale, "counts": counts}

    def activation(self, low: float, high: float, dtype: torch.dtype) -> Activation:
        """Return a symmetric activation, as llm-compressor."""
        return activation_for(low, high, symmetric=True)

    def write(
        self,
        name: str,
        weight: Tensor,
        bias: Tensor | None,
        activation: Activation | None,
        dtype: torch.dtype,
        settings: Mapping[str, Any],
    ) -> dict[str, Tensor]:
        assert activation is not None
        found = super().write(name, weight, bias, activation, dtype, settings)
        found["input_scale"] = torch.tensor([activation.scale], dtype=torch.float32)
        if activation.offset:
            found["input_zero_point"] = torch.tensor([activation.offset], dtype=torch.int8)
        return found


class ModelSlimStatic(StaticInput, ModelSlimRows):
    """The tensors of ModelSlim: a scale of each row's results, and an integer bias with the offset's part."""

    offset, requires_offset = "input_offset", True

    def declare(self, layer: QuantizedLinear) -> Mapping[str, Weight]:
        deq_scale = (torch.float32, torch.bfloat16, torch.int64)
        redundant: dict[str, Any] = {"dtype": torch.float32, "optional": True, "column": True}
        return {
            **super().declare(layer),
            "deq_scale": layer.declare("deq_scale", OUT, stored=deq_scale, column=True, checks=RESULT_SCALES),
            "quant_bias": layer.declare("quant_bias", OUT, dtype=torch.int32, column=True, added=True),
            # The three above are more precise than these.
            "weight_scale": layer.declare("weight_scale", OUT, **redundant),
            "bias": layer.declare("bias", OUT, **redundant),
        }

    def decode(self, stored: StoredLayer) -> Tensors:
        found, deq_scale = super().decode(stored), as_float32(stored["deq_scale"])
        counts, sums = stored["quant_bias"].double(), int8_row_sums(stored["weight"])
        offset = rows_of(stored, stored["input_offset"])
        return {**found, "deq_scale": deq_scale.float(), "counts": counts + offset * sums, "row_sums": sums}

    def activation(self, low: float, high: float, dtype: torch.dtype) -> Activation:
        """Return an activation with an offset, as ModelSlim."""
        return activation_for(low, high, symmetric=False, dtype=dtype)

    def write(
        self,
        name: str,
        weight: Tensor,
        bias: Tensor | None,
        activation: Activation | None,
        dtype: torch.dtype,
        settings: Mapping[str, Any],
    ) -> dict[str, Tensor]:
        assert activation is not None
        found = super().write(name, weight, None, activation, dtype, settings)
        deq_scale = found["weight_scale"].flatten().float() * torch.tensor(activation.scale, dtype=torch.float32)
        counts = torch.zeros_like(deq_scale) if bias is None else bias_counts(bias, deq_scale)
        found["input_scale"] = torch.tensor([activation.scale], dtype=dtype)
        found["input_offset"] = torch.tensor([activation.offset], dtype=dtype)
        found["quant_bias"] = (counts.round().long() - activation.offset * int8_row_sums(found["weight"])).int()
        # float16 kernels take the bits as int64.
        found["deq_scale"] = deq_scale.view(torch.int32).long() if dtype == torch.float16 else deq_scale
        return found


class W8A8(Scheme):
    """Static W8A8.

    Args:
        symmetric: whether the checkpoint says that all offsets of activations are 0.
    """

    name = "w8a8"
    summary = "int8 weights as w8a16, and int8 activations, static per tensor"
    representations: ClassVar = {
        COMPRESSED_TENSORS: CompressedStatic(ConfigGroup(CHANNEL_WEIGHTS, TENSOR)),
        MODELSLIM: ModelSlimStatic("W8A8"),
    }

    def __init__(self, symmetric: bool = False) -> None:
        self.symmetric = symmetric

    def configured(self, settings: Mapping[str, Any]) -> Scheme:
        """Return the scheme for ``symmetric`` of ``input_activations``."""
        return W8A8((settings.get("input_activations") or {}).get("symmetric") is True)

    def layer(self, linear: Linear) -> StaticQuantizedLinear:
        return StaticQuantizedLinear(linear)

    def grouped_layer(self, linear: GroupedLinear) -> StaticQuantizedGroupedLinear:
        return StaticQuantizedGroupedLinear(linear)

    def finish(self, stored: StoredLayer) -> Tensors:
        """Merge the parts: they have one input, so that all take the largest of their scales."""
        scales, offsets = stored["input_scale"], stored["input_offset"].flatten().tolist()
        if self.symmetric and any(offsets):
            name, offset = next(pair for pair in zip(stored.names, offsets, strict=True) if pair[1])
            raise CheckpointError(
                f"{name} has the input_zero_point {offset}, but activations are described as symmetric",
                AGAIN,
            )
        if len({*offsets}) > 1:
            found = ", ".join(f"{offset} of {name}" for name, offset in zip(stored.names, offsets, strict=True))
            raise CheckpointError(
                f"layers that are merged into one have different input offsets: {found}",
                "quantize them together, with symmetric activations, whose offset is 0, or with w8a8_dynamic",
            )
        scale, offset, width = scales.max(), offsets[0], stored["weight"].shape[-1]
        # The weights' scales stay. The scale and the bias of each row are converted to the larger unit.
        ratio = rows_of(stored, scales).double() / scale.double()
        deq_scale, counts = (stored["deq_scale"].double() / ratio).float(), stored["counts"] * ratio
        stored.check_rows(deq_scale.isfinite(), "the scales of {} are too large for float32")
        check_rows_of_zeros(stored, deq_scale)
        bias = counts.round()
        if offset:
            sums = stored.tensors.get("row_sums")
            bias -= offset * (int8_row_sums(stored["weight"]) if sums is None else sums)
        stored.check_rows(bias.abs() <= INT32_MAX, "the bias of {} does not fit into 32 bits in units of its scale")
        return {
            "weight": stored["weight"],
            "input_scale": scale.expand(width).clone(),
            "input_offset": torch.full((width,), offset, dtype=torch.int32) if offset else None,
            "quant_bias": bias.to(torch.int32) if bool(bias.any()) else None,
            "deq_scale": deq_scale,
        }


def as_float32(scale: Tensor) -> Tensor:
    """Return scales, of which int64 ones are the bits of float32."""
    return scale.to(torch.int32).view(torch.float32) if scale.dtype == torch.int64 else scale


def rows_of(stored: StoredLayer, parts: Tensor) -> Tensor:
    """Return a number for each row of this rank, from one for each part of all experts."""
    layer = stored.layer
    if layer.num_experts is not None:
        parts = parts[stored.first_expert : stored.first_expert + stored["weight"].shape[0]]
    return parts.repeat_interleave(torch.tensor(layer.stored_sizes), dim=-1)
