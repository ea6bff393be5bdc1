"""The arithmetic of int8 layers: quantization of weights, scales of activations, and merging of layers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from hal.errors import CheckpointError

INT32_MAX = 2**31 - 1
AGAIN = "the checkpoint is damaged: quantize or download it again"


@attrs.frozen(eq=False)
class Activation:
    """The quantization of a layer's input to int8: ``round(x / scale) + offset``, clamped to -128 and 127."""

    scale: float
    offset: int = 0


@attrs.frozen(eq=False)
class StaticLayer:
    """A projection, or a part of a merged one, whose activations have a fixed scale.

    ``y = (q @ weight.T + quant_bias) * deq_scale``, where ``q`` is the quantized input.

    Attributes:
        name: the layer's name in the checkpoint.
        activation: the quantization of the input.
        deq_scale: ``[rows]``, float32.
        quant_bias: ``[rows]``, int64: the bias in units of deq_scale, minus ``offset * row_sums``.
        row_sums: ``[rows]``, int64: the sums of the weight's rows.
    """

    name: str
    activation: Activation
    deq_scale: Tensor
    quant_bias: Tensor
    row_sums: Tensor


@attrs.frozen(eq=False)
class ScaledLayer:
    """A projection, or a part of a merged one, whose activations have no scale in the checkpoint.

    Attributes:
        name: the layer's name in the checkpoint.
        weight_scale: ``[rows]``, float32.
        bias: ``[rows]``, float32, or None.
    """

    name: str
    weight_scale: Tensor
    bias: Tensor | None


def quantize_weight(name: str, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize ``[rows, columns]`` symmetrically per row: ``scale = max|row| / 127``; half rounds to even.

    Returns:
        int8 of the same shape, and the scales, float32 ``[rows]``. A row of zeros has the scale 1.

    Raises:
        CheckpointError: a value is NaN or infinite.
    """
    wide = weight.float()
    largest = wide.abs().amax(-1)
    if not bool(largest.isfinite().all()):
        raise CheckpointError(f"{name} has values that are not finite", "use a checkpoint with finite weights")
    scale = torch.where(largest == 0, 1.0, largest / 127)
    return (wide / scale.unsqueeze(-1)).round().clamp(-127, 127).to(torch.int8), scale


def activation_for(low: float, high: float, *, symmetric: bool, dtype: torch.dtype = torch.float32) -> Activation:
    """Return the quantization of inputs from ``low`` to ``high`` that represents 0 exactly.

    Args:
        low: the smallest observed input.
        high: the largest observed input.
        symmetric: whether the offset is 0.
        dtype: the dtype to store the scale in. The scale is rounded to it here, so that every reader computes the same.
    """
    low, high = min(low, 0.0), max(high, 0.0)
    span = max(-low, high) / 127 if symmetric else (high - low) / 255
    scale = float(torch.tensor(span or 1.0, dtype=torch.float64).to(dtype))
    # The smallest scale that float16 can store; inputs that small quantize to 0 anyway.
    scale = max(scale, torch.finfo(dtype).tiny)
    return Activation(scale, 0 if symmetric else max(-128, min(127, round(-128 - low / scale))))


def fold(name: str, activation: Activation, weight_scale: Tensor, row_sums: Tensor, bias: Tensor | None) -> StaticLayer:
    """Return a layer from its scales and its bias, ``[rows]`` floating or None."""
    deq_scale = weight_scale.float() * torch.tensor(activation.scale, dtype=torch.float32)
    counts = torch.zeros_like(row_sums)
    if bias is not None:
        # A row of zero weights may have the scale 0; avoid the division if its bias is 0.
        exact = torch.where(bias == 0, 0.0, bias.double() / deq_scale.double())
        counts = _whole(name, exact)
    return StaticLayer(name, activation, deq_scale, counts - activation.offset * row_sums, row_sums)


def merge_static(parts: Sequence[StaticLayer]) -> StaticLayer:
    """Merge layers with the same input: concatenate their rows, and use the largest input scale.

    Raises:
        CheckpointError: offsets differ, a number is not finite, or a bias does not fit into 32 bits.
    """
    if len({part.activation.offset for part in parts}) > 1:
        found = ", ".join(f"{part.activation.offset} of {part.name}" for part in parts)
        raise CheckpointError(
            f"layers that are merged into one have different input offsets: {found}",
            "quantize them together, with symmetric activations, whose offset is 0, or with w8a8_dynamic",
        )
    scale, offset = max(part.activation.scale for part in parts), parts[0].activation.offset
    scales, biases = [], []
    for part in parts:
        deq_scale, bias = part.deq_scale, part.quant_bias
        if part.activation.scale != scale:  # keep the weight scale, and convert the bias to the larger unit
            ratio = part.activation.scale / scale
            correction = offset * part.row_sums
            deq_scale = (deq_scale.double() / ratio).float()
            bias = _whole(part.name, (bias + correction).double() * ratio) - correction
        if not bool(deq_scale.isfinite().all()) or bool((deq_scale < 0).any()):
            raise CheckpointError(f"the scales of {part.name} are not all finite and positive", AGAIN)
        if bool((bias.abs() > INT32_MAX).any()):
            raise CheckpointError(f"the bias of {part.name} does not fit into 32 bits in units of its scale", AGAIN)
        scales.append(deq_scale)
        biases.append(bias)
    sums = torch.cat([part.row_sums for part in parts])
    return StaticLayer(parts[0].name, Activation(scale, offset), torch.cat(scales), torch.cat(biases), sums)


def merge_scaled(parts: Sequence[ScaledLayer]) -> ScaledLayer:
    """Merge layers with the same input by concatenating their rows.

    Raises:
        CheckpointError: a scale is not finite.
    """
    for part in parts:
        if not bool(part.weight_scale.isfinite().all()) or bool((part.weight_scale < 0).any()):
            raise CheckpointError(f"the scales of {part.name} are not all finite and positive", AGAIN)
    biases = [part.bias for part in parts if part.bias is not None]
    bias = torch.cat(biases) if biases else None  # the loader has checked that all parts have a bias or none has
    return ScaledLayer(parts[0].name, torch.cat([part.weight_scale for part in parts]), bias)


def input_activation(name: str, scale: Tensor, offset: Tensor | None) -> Activation:
    """Return the quantization that a checkpoint's scale and offset tensors, of one element each, specify.

    Raises:
        CheckpointError: the scale is not positive and finite, or the offset is not an 8-bit integer.
    """
    found, shift = float(scale.double()), 0.0 if offset is None else float(offset.double())
    if not (math.isfinite(found) and found > 0):
        raise CheckpointError(f"the input scale of {name} is {found}, not positive and finite", AGAIN)
    if not (-128 <= shift <= 127 and shift == int(shift)):
        raise CheckpointError(f"the input offset of {name} is {shift}, not an integer from -128 to 127", AGAIN)
    return Activation(found, int(shift))


def _whole(name: str, values: Tensor) -> Tensor:
    if not bool((values.abs() <= INT32_MAX).all()):  # also false for NaN
        raise CheckpointError(f"the bias of {name} does not fit into 32 bits in units of its scale", AGAIN)
    return values.round().to(torch.int64)
