"""A quantization scheme: int8 weights with a scale and a zero point per row, and floating-point activations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from hal import ops
from hal.nn import Linear, QuantizedLinear, Weight
from hal.ops import FLOATING, Draw, Sample
from hal.quantization.compressed_tensors import CHANNEL_WEIGHTS, COMPRESSED_TENSORS, ConfigGroup
from hal.quantization.representation import Representation
from hal.quantization.scheme import Scheme


def _samples(draw: Draw) -> Iterator[Sample]:
    for rows, width, out in ((1, 16, 24), (5, 24, 16), (9, 32, 8)):
        weight = draw.integers(-127, 128, out, width, dtype=torch.int8)
        scale, zero = _factors(draw, out)
        yield draw.normal(rows, width), weight, scale, zero, None
    yield draw.normal(2, 3, 32), weight, scale, zero, draw.normal(out)


def _factors(draw: Draw, out: int) -> tuple[Tensor, Tensor]:
    scale = draw.integers(1, 9, out, 1, dtype=torch.int64).float() * 1e-3
    return scale, draw.integers(-9, 10, out, 1, dtype=torch.int8)


@ops.op(
    samples=_samples,
    axes={
        "x": "... in_features",
        "weight": "out_features in_features",
        "weight_scale": "out_features 1",
        "zero_point": "out_features 1",
        "bias": "out_features",
        "return": "... out_features",
    },
    dtypes={
        "x": FLOATING,
        "weight": torch.int8,
        "weight_scale": torch.float32,
        "zero_point": torch.int8,
        "bias": "x",
        "return": "x",
    },
    rowwise="...",
    weights=("weight",),
    namespace="hal_toys",
)
def int8_linear(x: Tensor, weight: Tensor, weight_scale: Tensor, zero_point: Tensor, bias: Tensor | None) -> Tensor:
    """Compute ``x @ ((weight - zero_point) * weight_scale).T + bias`` in float32, rounded once."""
    result = x.float() @ ((weight.float() - zero_point.float()) * weight_scale).t()
    return (result if bias is None else result + bias.float()).to(x.dtype)


class Int8Linear(QuantizedLinear):
    """A projection with int8 weights."""

    operation = "int8_linear"
    weight: Tensor
    weight_scale: Tensor
    weight_zero_point: Tensor
    bias: Tensor | None

    @property
    def weights(self) -> Mapping[str, Weight]:
        return {
            "weight": self.declare("weight", dtype=torch.int8),
            "weight_scale": self.declare("weight_scale", "out_features one", dtype=torch.float32, sizes={"one": 1}),
            "weight_zero_point": self.declare(
                "weight_zero_point", "out_features one", dtype=torch.int8, sizes={"one": 1}
            ),
            "bias": self.declare("bias", "out_features", added=True),
        }

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = int8_linear(x, self.weight, self.weight_scale, self.weight_zero_point, self.bias)
        return self.join(result)


class Int8Weights(Scheme):
    """A scheme whose layer declares all tensors that it reads."""

    name = "int8_weights"
    summary = "int8 weights with a scale and a zero point for each output channel, and floating activations"
    representations = {  # noqa: RUF012 - a constant
        COMPRESSED_TENSORS: Representation(ConfigGroup({**CHANNEL_WEIGHTS, "symmetric": False}, None))
    }

    def layer(self, linear: Linear) -> Int8Linear:
        return Int8Linear(linear)
