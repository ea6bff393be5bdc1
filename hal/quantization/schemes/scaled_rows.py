"""The common base of schemes whose checkpoints hold int8 weights with a scale per row, and no other scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from hal.nn import GroupedLinear, Linear, QuantizedLinear, Weight
from hal.nn.linear import OUT
from hal.nn.quantized_linear import ScaledTensors
from hal.quantization import compressed_tensors, modelslim
from hal.quantization.compressed_tensors import COMPRESSED_TENSORS
from hal.quantization.int8_arithmetic import Activation, quantize_weight
from hal.quantization.modelslim import MODELSLIM
from hal.quantization.representation import Representation, StoredLayer, Tensors
from hal.quantization.scheme import Scheme
from hal.quantization.value_checks import NOT_NEGATIVE, SYMMETRIC

NUMBERS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.int32, torch.int64)


class SymmetricRows(Representation):
    """Int8 rows whose zero points, if the checkpoint has any, are 0.

    Attributes:
        zero_point: the tensor of the zero points.
        writes_zero_point: whether the format requires it.
    """

    zero_point: ClassVar[str]
    writes_zero_point: ClassVar[bool]

    def declare(self, layer: QuantizedLinear) -> Mapping[str, Weight]:
        given: dict[str, Any] = {"dtype": torch.float32, "column": True}
        return {
            "weight_scale": layer.declare("weight_scale", OUT, checks=(NOT_NEGATIVE,), **given),
            self.zero_point: layer.declare(
                self.zero_point, OUT, stored=NUMBERS, optional=True, checks=(SYMMETRIC,), **given
            ),
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
        values, scale = quantize_weight(name, weight)
        found = {"weight": values, "weight_scale": scale.unsqueeze(-1)} | ({} if bias is None else {"bias": bias})
        return found | ({self.zero_point: torch.zeros_like(scale).unsqueeze(-1)} if self.writes_zero_point else {})


class CompressedRows(SymmetricRows):
    """The tensors of compressed-tensors."""

    zero_point, writes_zero_point = compressed_tensors.ZERO_POINT, False


class ModelSlimRows(SymmetricRows):
    """The tensors of ModelSlim."""

    zero_point, writes_zero_point = modelslim.ZERO_POINT, True


def row_representations(group: Mapping[str, Any] | None, kind: str) -> Mapping[str, Representation]:
    """Return the representations of a scheme with int8 rows, from ``input_activations`` and from ModelSlim's type."""
    described = compressed_tensors.ConfigGroup(compressed_tensors.CHANNEL_WEIGHTS, group)
    return {COMPRESSED_TENSORS: CompressedRows(described), MODELSLIM: ModelSlimRows(kind)}


def check_rows_of_zeros(stored: StoredLayer, scale: Tensor) -> None:
    """Raise CheckpointError if a row has the scale 0 and other numbers."""
    if bool((scale == 0).any()):
        used = stored["weight"].any(-1).to(scale.device)
        stored.check_rows((scale != 0) | ~used, "a row of {} has the scale 0, and other numbers")


class ScaledRows(Scheme):
    """Int8 weights with a scale per row.

    Attributes:
        layers: the classes of the layers that replace a linear layer, and the projections of experts.
    """

    layers: ClassVar[tuple[type[ScaledTensors], type[ScaledTensors]]]

    def layer(self, linear: Linear) -> ScaledTensors:
        return self.layers[0](linear)

    def grouped_layer(self, linear: GroupedLinear) -> ScaledTensors:
        return self.layers[1](linear)

    def finish(self, stored: StoredLayer) -> Tensors:
        check_rows_of_zeros(stored, stored["weight_scale"])
        return super().finish(stored)

    def dequantize(self, tensors: Tensors, width: int) -> Tensor:
        weight, scale = tensors["weight"], tensors["weight_scale"]
        assert weight is not None
        assert scale is not None
        return weight.float() * scale.float().unsqueeze(-1)
