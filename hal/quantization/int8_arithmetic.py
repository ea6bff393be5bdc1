"""The numbers of W8A8: weights to int8, the scale of activations, and layers put together from their parts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from hal.errors import CheckpointError

INT32_MAX = 2**31 - 1
AGAIN = "the checkpoint is damaged: quantise or download it again"


@attrs.frozen(eq=False)
class Activation:
    """How a layer's input becomes int8: ``round(x / scale) + offset``, clamped to -128 and 127."""

    scale: float
    offset: int = 0


@attrs.frozen(eq=False)
class StaticLayer:
    """A projection whose activations have a scale that is known beforehand, or one part of it.

    ``y = (q @ weight.T + quant_bias) * deq_scale``, where ``q`` is the quantised input.

    Attributes:
        name: of the layer in the checkpoint.
        activation: of the input.
        deq_scale: ``[rows]``, float32.
        quant_bias: ``[rows]``, int64: the bias in units of deq_scale, less ``offset * row_sums``.
        row_sums: ``[rows]``, int64, of the weight.
    """

    name: str
    activation: Activation
    deq_scale: Tensor
    quant_bias: Tensor
    row_sums: Tensor


@attrs.frozen(eq=False)
class DynamicLayer:
    """A projection whose activations get a scale for each token, or one part of it.

    Attributes:
        name: of the layer in the checkpoint.
        weight_scale: ``[rows]``, float32.
        bias: ``[rows]``, float32, or None.
    """

    name: str
    weight_scale: Tensor
    bias: Tensor | None


def quantize_weight(name: str, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise ``[rows, columns]`` symmetrically, row by row: ``scale = max|row| / 127``, half rounds to even.

    Returns:
        int8 of the same shape, and the scales, float32 ``[rows]``. A row of zeros has the scale 1.

    Raises:
        CheckpointError: a value is no number, or infinite.
    """
    wide = weight.float()
    largest = wide.abs().amax(-1)
    if not bool(largest.isfinite().all()):
        raise CheckpointError(f"{name} holds values that are not finite", "use a checkpoint whose weights are")
    scale = torch.where(largest == 0, 1.0, largest / 127)
    return (wide / scale.unsqueeze(-1)).round().clamp(-127, 127).to(torch.int8), scale


def activation_for(low: float, high: float, *, symmetric: bool, dtype: torch.dtype = torch.float32) -> Activation:
    """The scale and offset that take all of ``low`` to ``high``, and 0 exactly.

    Args:
        low: the smallest input seen.
        high: the largest.
        symmetric: whether the offset is 0.
        dtype: what the scale will be stored in. It is rounded to that now, so that all who read it compute the same.
    """
    low, high = min(low, 0.0), max(high, 0.0)
    span = max(-low, high) / 127 if symmetric else (high - low) / 255
    scale = float(torch.tensor(span or 1.0, dtype=torch.float64).to(dtype))
    # float16 holds nothing smaller; inputs as small as that come out as 0 in any case.
    scale = max(scale, torch.finfo(dtype).tiny)
    return Activation(scale, 0 if symmetric else max(-128, min(127, round(-128 - low / scale))))


def fold(name: str, activation: Activation, weight_scale: Tensor, row_sums: Tensor, bias: Tensor | None) -> StaticLayer:
    """A layer from its scales and its bias ``[rows]``, floating or None."""
    deq_scale = weight_scale.float() * torch.tensor(activation.scale, dtype=torch.float32)
    counts = torch.zeros_like(row_sums)
    if bias is not None:
        # A row whose weights are all zero may have the scale 0; without a bias, nothing is divided by it.
        exact = torch.where(bias == 0, 0.0, bias.double() / deq_scale.double())
        counts = _whole(name, exact)
    return StaticLayer(name, activation, deq_scale, counts - activation.offset * row_sums, row_sums)


def merge_static(parts: Sequence[StaticLayer]) -> StaticLayer:
    """One layer of several that have the same input: rows one after another, under the largest of the input scales.

    Raises:
        CheckpointError: their offsets differ, a number is not finite, or a bias does not fit into 32 bits.
    """
    if len({part.activation.offset for part in parts}) > 1:
        found = ", ".join(f"{part.activation.offset} of {part.name}" for part in parts)
        raise CheckpointError(
            f"layers that share an input have different input offsets: {found}",
            "quantise them together, or with symmetric activations, whose offset is 0",
        )
    scale, offset = max(part.activation.scale for part in parts), parts[0].activation.offset
    scales, biases = [], []
    for part in parts:
        deq_scale, bias = part.deq_scale, part.quant_bias
        if part.activation.scale != scale:  # its weights' scale is as it was, its bias counts larger units
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


def merge_dynamic(parts: Sequence[DynamicLayer]) -> DynamicLayer:
    """One layer of several that have the same input: rows one after another.

    Raises:
        CheckpointError: a scale is not finite.
    """
    for part in parts:
        if not bool(part.weight_scale.isfinite().all()) or bool((part.weight_scale < 0).any()):
            raise CheckpointError(f"the scales of {part.name} are not all finite and positive", AGAIN)
    biases = [part.bias for part in parts if part.bias is not None]
    bias = torch.cat(biases) if biases else None  # the loader has seen to it that all have one or none has
    return DynamicLayer(parts[0].name, torch.cat([part.weight_scale for part in parts]), bias)


def input_activation(name: str, scale: Tensor, offset: Tensor | None) -> Activation:
    """The activation that a checkpoint's tensors of one element say.

    Raises:
        CheckpointError: the scale is not positive and finite, or the offset no whole number of 8 bits.
    """
    found, shift = float(scale.double()), 0.0 if offset is None else float(offset.double())
    if not (math.isfinite(found) and found > 0):
        raise CheckpointError(f"the input scale of {name} is {found}, not positive and finite", AGAIN)
    if not (-128 <= shift <= 127 and shift == int(shift)):
        raise CheckpointError(f"the input offset of {name} is {shift}, no whole number from -128 to 127", AGAIN)
    return Activation(found, int(shift))


def _whole(name: str, values: Tensor) -> Tensor:
    if not bool((values.abs() <= INT32_MAX).all()):  # NaN is not, either
        raise CheckpointError(f"the bias of {name} does not fit into 32 bits in units of its scale", AGAIN)
    return values.round().to(torch.int64)
