"""The arithmetic of integer weights: int8 rows, unsigned numbers packed into int32, and quantization in groups."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import torch
from torch import Tensor

from hal.errors import CheckpointError
from hal.ops.forms import Form

INT32_MAX = 2**31 - 1
AGAIN = "the checkpoint is damaged: quantize or download it again"


@attrs.frozen(eq=False)
class Activation:
    """The quantization of a layer's input to int8: ``round(x / scale) + offset``, clamped to -128 and 127."""

    scale: float
    offset: int = 0


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


def bias_counts(bias: Tensor, deq_scale: Tensor) -> Tensor:
    """Return a bias in units of ``deq_scale``, float64 and not rounded."""
    # A row of zero weights may have the scale 0; avoid the division if its bias is 0.
    return torch.where(bias == 0, 0.0, bias.double() / deq_scale.double())


def int8_row_sums(weight: Tensor) -> Tensor:
    """Return the sums of int8 rows ``[..., columns]``, int64 on the CPU. Sums some rows at a time."""
    rows = weight.flatten(0, -2)
    count = max(1, (_SUMMED if weight.device.type == "cpu" else _SUMMED_ON_DEVICE) // max(1, rows.shape[1]))
    sums = [part.sum(-1, dtype=torch.int64) for part in rows.split(count)]
    return torch.cat(sums).cpu().view(weight.shape[:-1])


_SUMMED = 1 << 15
"""Elements per sum: torch widens them first, and large temporaries would fragment the heap."""
_SUMMED_ON_DEVICE = 1 << 22


SHARES = {4: (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7), 8: (1.0,)}
"""The parts of the largest number of a group that :func:`quantize_groups` tries as the range, by bits."""
ELEMENTS = 1 << 22
"""The elements of a weight that are quantized at once."""
# In each number of an int32, the difference of the highest bit: between unsigned numbers and two's complement.
_SIGNS = {4: -0x77777778, 8: -0x7F7F7F80}


def in_one(bits: int) -> int:
    """Return how many numbers an int32 holds."""
    return 32 // bits


def unsigned(packed: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Return the unsigned numbers in int32 ``[..., width]``, int32 ``[..., width * 32 / bits]``, the lowest bits first.

    Args:
        packed: the numbers.
        bits: those of a number.
        order: the place, in an int32, of each of its numbers; None for their own order.
    """
    places = torch.tensor(order or range(in_one(bits)), dtype=torch.int32)
    shifted: Tensor = packed.unsqueeze(-1) >> places * bits
    numbers: Tensor = shifted & ((1 << bits) - 1)
    return numbers.flatten(-2)


def signed_weight(packed: Tensor, bits: int, width: int) -> Tensor:
    """Return a weight as :func:`hal.ops.linear` takes it, in the memory of the packed one.

    Args:
        packed: int32 ``[..., out_features, ceil(width * bits / 32)]``, contiguous: unsigned numbers, among which the
            middle of the range means 0.
        bits: those of a number, 4 or 8.
        width: the numbers of a row.
    """
    signed = packed.bitwise_xor_(_SIGNS[bits])
    return signed if bits == 4 else signed.view(torch.int8)[..., :width].contiguous()


def packed_signed(numbers: Tensor, bits: int) -> Tensor:
    """Return int8 numbers ``[rows, width]`` as the unsigned ones of :func:`signed_weight`, the inverse."""
    padded = torch.nn.functional.pad(numbers.contiguous(), (0, -numbers.shape[-1] % in_one(bits)))
    found = padded.view(torch.uint8) + (1 << bits - 1)
    if bits == 4:
        found = found[:, ::2] & 15 | found[:, 1::2] << 4
    return found.view(torch.int32)


def packed_zero_points(zero_points: Tensor, bits: int) -> Tensor:
    """Return zero points, int8 ``[rows, groups]``, packed along the rows: int32 ``[rows * bits / 32, groups]``."""
    return transposed(packed_signed(zero_points.t(), bits))


def signed_zero_points(zero_points: Tensor, bits: int) -> Tensor:
    """Return unsigned zero points for the numbers that :func:`signed_weight` returns."""
    return (zero_points - (1 << bits - 1)).to(torch.int8).contiguous()


def transposed(matrix: Tensor) -> Tensor:
    """Return a contiguous copy of a matrix with its dimensions exchanged, for ``StoredLayer.by_expert``."""
    return matrix.t().clone(memory_format=torch.contiguous_format)


def row_ranges(weight: Tensor) -> Iterator[slice]:
    """Yield ranges of the rows of a matrix, of about :data:`ELEMENTS` elements each."""
    count = max(ELEMENTS // weight.shape[1], 1)
    return (slice(first, first + count) for first in range(0, len(weight), count))


def quantize_groups(weight: Tensor, form: Form, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantize ``[rows, columns]`` in groups. Of some scales, each group gets that of the least error.

    Args:
        weight: the weight, finite.
        form: of 4 or 8 bits; its zero points are those of the numbers from the least to the largest, and 0.
        dtype: that of the scales.

    Returns:
        Numbers from ``-2 ** (bits - 1)``, int8 ``[rows, columns]``; the scales ``[rows, groups]``; and zero points,
        int8 of that shape, or None in a symmetric form. A group of zeros has the scale 1.
    """
    found = [_quantized_rows(weight[rows], form, dtype) for rows in row_ranges(weight)]
    numbers, scale, zero = (torch.cat(each) for each in zip(*found, strict=True))
    return numbers, scale, zero if form.zero_points else None


def _quantized_rows(weight: Tensor, form: Form, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    bits, groups = form.kind.bits, weight.float().unflatten(-1, (-1, form.group(weight.shape[1])))
    most, span = (1 << bits - 1) - 1, (1 << bits) - 1
    low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
    largest, width = torch.maximum(-low, high), high - low
    best, error = torch.empty_like(groups), torch.full_like(largest, torch.inf)
    scale, zero = torch.ones_like(largest), torch.zeros_like(largest)
    for ratio in SHARES[bits]:
        tried = (width * (ratio / span) if form.zero_points else largest * (ratio / most)).to(dtype).float()
        tried = torch.where(tried == 0, 1.0, tried)
        middle = (-most - 1 - low * ratio / tried).round().clamp(-most - 1, most) if form.zero_points else zero
        numbers = ((groups / tried).round() + middle).clamp(-most - 1, most)
        found = ((numbers - middle) * tried - groups).square().sum(-1, keepdim=True)
        better = found < error
        best, scale = torch.where(better, numbers, best), torch.where(better, tried, scale)
        zero = torch.where(better, middle, zero) if form.zero_points else zero
        error = torch.minimum(found, error)
    return best.flatten(-2).to(torch.int8), scale.squeeze(-1).to(dtype), zero.squeeze(-1).to(torch.int8)
