"""Rules for the values of scales and zero points: what a reader declares in ``checks``."""

from __future__ import annotations

import torch
from torch import Tensor

from hal.nn import Projection, ValueCheck
from hal.quantization.integer_arithmetic import AGAIN

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that scales keep."""
NUMBERS = (torch.float64, *FLOATS, torch.int8, torch.int32, torch.int64)
"""The dtypes of zero points and offsets of int8 layers."""


def _finite(values: Tensor, above: bool) -> bool:
    wide = values.float() if values.dtype.itemsize == 1 else values  # torch does not compare float8
    return bool((wide.isfinite() & (wide > 0 if above else wide >= 0)).all())


POSITIVE = ValueCheck(lambda values: _finite(values, True), "has values that are not positive and finite", AGAIN)
NOT_NEGATIVE = ValueCheck(lambda values: _finite(values, False), "has values that are negative or not finite", AGAIN)
"""For scales of int8 rows, where 0 is that of a row of zeros."""
SYMMETRIC = ValueCheck(
    lambda values: not bool(values.any()),
    "has values other than 0, so its weights are asymmetric",
    "quantize its weights symmetrically",
)


def integers(low: int, high: int) -> ValueCheck:
    """Return the rule that all values are integers from ``low`` to ``high``."""

    def holds(values: Tensor) -> bool:
        return bool(((values >= low) & (values <= high) & (values == values.floor())).all())

    return ValueCheck(holds, f"has values other than integers from {low} to {high}", AGAIN)


def dimensions(layer: Projection) -> ValueCheck:
    """Return the rule that a tensor is the shape of the weight of a layer, or of one of its parts."""
    sizes = {layer.out_features} if layer.merged or not layer.parts else set(layer.layers.values())
    allowed = [[size, layer.in_features] for size in sorted(sizes)]
    expected = " or ".join(map(str, allowed))
    return ValueCheck(lambda values: values.tolist() in allowed, f"has a shape other than {expected}", AGAIN)
