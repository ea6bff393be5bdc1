"""Rules for the values of scales, zero points and group indices: what a representation declares in ``checks``."""

from __future__ import annotations

import torch
from torch import Tensor

from hal.nn import ValueCheck
from hal.nn.low_bits import WeightOnlyTensors
from hal.quantization.int8_arithmetic import AGAIN

CONVERTED = "set quantized_weights to dequantized, w8a16 or w8a8_dynamic"
_CONSECUTIVE = "use a checkpoint that was quantized with desc_act false, or with actorder null or weight"


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


def dimensions(layer: WeightOnlyTensors) -> ValueCheck:
    """Return the rule that a tensor is the shape of the weight of a layer, or of one of its parts."""
    sizes = {layer.out_features} if layer.merged or not layer.parts else set(layer.layers.values())
    allowed = [[size, layer.in_features] for size in sorted(sizes)]
    expected = " or ".join(map(str, allowed))
    return ValueCheck(lambda values: values.tolist() in allowed, f"has a shape other than {expected}", AGAIN)


def group_index(layer: WeightOnlyTensors) -> tuple[ValueCheck, ...]:
    """Return the rules for the group of each input of a layer."""
    size, width = layer.group_size, layer.in_features
    count = -(-width // size)

    def consecutive() -> Tensor:
        return torch.arange(width, device="cpu") // size

    found = [
        ValueCheck(
            lambda values: bool(((values >= 0) & (values < count)).all()),
            f"has groups other than 0 to {count - 1}",
            AGAIN,
        ),
    ]
    if layer.any_groups:
        return tuple(found)
    found.append(
        ValueCheck(
            lambda values: torch.equal(values.long().bincount(minlength=count), consecutive().bincount()),
            f"has groups of other sizes than {size}",
            AGAIN,
        )
    )
    if not layer.ordered or layer.num_experts is not None:
        what = "experts" if layer.num_experts is not None else "a layer whose description says otherwise (desc_act)"
        found.append(
            ValueCheck(
                lambda values: torch.equal(values.long(), consecutive()),
                f"orders the inputs of {what} by activations (act-order)",
                _CONSECUTIVE if layer.num_experts is None else f"{CONVERTED}, or {_CONSECUTIVE}",
            )
        )
    return tuple(found)
