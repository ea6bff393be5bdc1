"""The arithmetic of integer weights: unsigned numbers packed into int32, and quantization in groups."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hal.errors import CheckpointError

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
    padded = torch.nn.functional.pad(numbers, (0, -numbers.shape[-1] % in_one(bits)))
    found = padded.view(torch.uint8) + (1 << bits - 1)
    if bits == 4:
        found = found[:, ::2] & 15 | found[:, 1::2] << 4
    return found.view(torch.int32)


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


def quantize_groups(name: str, weight: Tensor, bits: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize ``[rows, columns]`` symmetrically in groups. Of some scales, each group gets that of the least error.

    Args:
        name: the weight's name, for errors.
        weight: the weight.
        bits: those of a number, 4 or 8.
        size: the columns of a group, a divisor of the columns.
        dtype: that of the scales.

    Returns:
        Numbers from ``-2 ** (bits - 1)``, int8 ``[rows, columns]``, and the scales ``[rows, columns / size]``. A group
        of zeros has the scale 1.

    Raises:
        CheckpointError: a value is not finite.
    """
    numbers = weight.new_empty(weight.shape, dtype=torch.int8)
    scale = weight.new_empty(len(weight), weight.shape[1] // size, dtype=dtype)
    for rows in row_ranges(weight):
        numbers[rows], scale[rows] = _quantized_rows(name, weight[rows], bits, size, dtype)
    return numbers, scale


def _quantized_rows(name: str, weight: Tensor, bits: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    groups, most = weight.float().unflatten(-1, (-1, size)), (1 << bits - 1) - 1
    largest = groups.abs().amax(-1, keepdim=True)
    if not bool(largest.isfinite().all()):
        raise CheckpointError(f"{name} has values that are not finite", "use a checkpoint with finite weights")
    best, error = torch.empty_like(groups), torch.full_like(largest, torch.inf)
    scale = torch.ones_like(largest)
    for ratio in SHARES[bits]:
        tried = (largest * (ratio / most)).to(dtype).float()
        tried = torch.where(tried == 0, 1.0, tried)
        numbers = (groups / tried).round().clamp(-most - 1, most)
        found = (numbers * tried - groups).square().sum(-1, keepdim=True)
        better = found < error
        best, scale = torch.where(better, numbers, best), torch.where(better, tried, scale)
        error = torch.minimum(found, error)
    return best.flatten(-2), scale.squeeze(-1)
