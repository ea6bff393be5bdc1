"""Conversion of weights from one form to another when they are loaded."""

from __future__ import annotations

import torch
from torch import Tensor

from hal.ops.forms import Form, dequantize
from hal.quantization.input_order import GROUPS
from hal.quantization.int8_arithmetic import quantize_weight
from hal.quantization.stored_layer import StoredLayer, Tensors


def converted(stored: StoredLayer, decoded: Tensors, target: Form) -> Tensors:
    """Return the tensors of a layer in another form: floating-point numbers, or int8 with a scale for each row.

    Args:
        stored: the layer.
        decoded: its tensors in the stored form. Those of experts are converted one after the other.
        target: the form to convert to.

    Raises:
        CheckpointError: a weight is not finite.
    """
    weight = decoded["weight"]
    assert weight is not None
    bias = {"bias": decoded.get("bias")}
    if stored.layer.num_experts is None:
        return {**_converted(stored, decoded, target), **bias}
    found = [
        _converted(stored, {key: None if each is None else each[expert] for key, each in decoded.items()}, target)
        for expert in range(weight.shape[0])
    ]
    return {**{key: torch.stack([each[key] for each in found]) for key in found[0]}, **bias}


def _converted(stored: StoredLayer, decoded: Tensors, target: Form) -> dict[str, Tensor]:
    wide = dequantized(stored.local_form, decoded)
    if target.numbers == "float":
        return {"weight": wide}
    values, scale = quantize_weight(stored.names[0], wide)
    return {"weight": values, "weight_scale": scale.unsqueeze(-1)}


def dequantized(form: Form, decoded: Tensors) -> Tensor:
    """Return the weight of a layer, or of one expert, in float32: ``[out_features, in_features]``."""
    weight, scale, zero = decoded["weight"], decoded.get("weight_scale"), decoded.get("weight_zero_point")
    assert weight is not None
    if scale is None:
        return weight.float()
    if (groups := decoded.get(GROUPS)) is None:
        return dequantize(form, weight, scale, zero)
    wide = form.kind.values(weight)
    if zero is not None:
        wide = wide - zero.float()[:, groups]
    return wide * scale.float()[:, groups]
