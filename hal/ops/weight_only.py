"""Projections with weights of 8 or 4 bits in groups and floating-point activations, and lookups of their rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from hal.ops.declaration.dtypes import FLOATING
from hal.ops.declaration.operation import op
from hal.ops.declaration.samples import Draw, Sample

INT4S = 8
"""The 4-bit numbers in an int32."""
GROUPS = "(in_features+group_size-1)//group_size"
PACKED = (torch.int8, torch.int32)
SCALES = (torch.float32, torch.bfloat16, torch.float16)
ZERO_POINTS = (torch.int8, torch.float32, "x")


def unpack_int4(packed: Tensor) -> Tensor:
    """Return the 4-bit numbers of int32 ``[..., width]``, int32 ``[..., width * 8]``, from -8 to 7.

    The lowest four bits are the first number.
    """
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
    # Both expanded, because some devices' shift takes the shape of its first operand, and torch's fake shift fails to
    # expand to symbolic sizes.
    eights = packed.unsqueeze(-1).expand(*packed.shape, INT4S)
    shifted: Tensor = eights >> shifts.expand_as(eights)
    numbers: Tensor = ((shifted & 15) ^ 8) - 8
    return numbers.flatten(-2)


def pack_int4(numbers: Tensor) -> Tensor:
    """Return numbers from -8 to 7, ``[..., width]``, as int32 ``[..., width / 8]``: see :func:`unpack_int4`."""
    eights = (numbers & 15).to(torch.int32).unflatten(-1, (-1, INT4S))
    packed: Tensor = eights[..., 0].clone(memory_format=torch.contiguous_format)
    for place in range(1, INT4S):
        packed |= eights[..., place] << 4 * place
    return packed


def dequantize(weight: Tensor, weight_scale: Tensor, weight_zero_point: Tensor | None, group_size: int) -> Tensor:
    """Return ``(weight - weight_zero_point) * weight_scale``, float32 ``[..., out_features, in_features]``.

    For the arguments, see :func:`weight_only_linear`.
    """
    wide = (unpack_int4(weight) if weight.dtype == torch.int32 else weight).float()
    if weight_zero_point is not None:
        wide = wide - _spread(weight_zero_point, group_size, wide.shape[-1])
    return wide * _spread(weight_scale, group_size, wide.shape[-1])


def _spread(factors: Tensor, group_size: int, width: int) -> Tensor:
    """Return the factor of each element of a row from those of its groups, float32."""
    if factors.shape[-1] == 1:
        return factors.float()
    return factors.float().repeat_interleave(group_size, -1)[..., :width]


def group_shapes() -> Iterator[tuple[int, int, int]]:
    """Yield in_features, out_features and group_size: groups of each usual size, a whole row, and a shorter last one.

    The last is that of a rank whose part of a row is within a group.
    """
    yield 64, 96, 32
    yield 256, 64, 128
    yield 128, 32, 64
    yield 192, 48, 192
    yield 96, 40, 64
    yield 64, 24, 128


def quantized_groups(draw: Draw, bits: int, *shape: int, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a weight ``[..., out_features, in_features]``, its scales in float32, and its zero points in int8."""
    *rows, width = shape
    groups, most = -(-width // group_size), 1 << bits - 1
    if bits == 4:
        weight = draw.integers(-(1 << 31), 1 << 31, *rows, width // INT4S, dtype=torch.int32)
    else:
        weight = draw.integers(-most, most, *shape, dtype=torch.int8)
    scale = draw.integers(50, 200, *rows, groups).float() * (1e-2 / most * width**-0.5)
    return weight, scale, draw.integers(-most, most, *rows, groups, dtype=torch.int8)


def _weight_only_samples(draw: Draw) -> Iterator[Sample]:
    for place, (width, out, size) in enumerate(group_shapes()):
        for bits in (8, 4):
            weight, scale, zero = quantized_groups(draw, bits, out, width, group_size=size)
            x, bias = draw.normal((1, 17, 0, 3, 5, 2)[place], width), draw.normal(out)
            yield x, weight, scale, None, None, size
            yield x, weight, scale, zero, bias.float() if place % 2 else bias, size
    yield x.view(1, *x.shape), weight, scale.to(torch.bfloat16), zero.float() + 0.25, None, size
    yield x, weight, scale.to(torch.float16), zero, None, size


@op(
    samples=_weight_only_samples,
    axes={
        "x": "... in_features",
        "weight": "out_features in_features|in_features//8",
        "weight_scale": f"out_features {GROUPS}",
        "weight_zero_point": f"out_features {GROUPS}",
        "bias": "out_features",
        "return": "... out_features",
    },
    dtypes={
        "x": FLOATING,
        "weight": PACKED,
        "weight_scale": SCALES,
        "weight_zero_point": ZERO_POINTS,
        "bias": (torch.float32, "x"),
        "return": "x",
    },
    rowwise="...",
    weights=("weight", "weight_scale", "weight_zero_point", "bias"),
)
def weight_only_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor | None,
    bias: Tensor | None,
    group_size: int,
) -> Tensor:
    """Project with weights of 8 or 4 bits: ``x @ ((weight - weight_zero_point) * weight_scale).T + bias``.

    Each row of the weight has groups of ``group_size`` consecutive elements, the last of which may be shorter. A group
    has one scale and one zero point, at ``[row, column // group_size]``. Accumulated in float32 and rounded to x's
    dtype once. A kernel may round scales, zero points and the scaled weights to x's dtype, too.

    Args:
        x: ``[..., in_features]``, floating.
        weight: int8 ``[out_features, in_features]``; or int32 ``[out_features, in_features / 8]``, which holds eight
            4-bit numbers from -8 to 7, in two's complement. The element ``[row, c]`` has the columns ``8 * c`` to
            ``8 * c + 7``, the first one in the lowest four bits. Or as :meth:`hal.Backend.prepare_weight` returned it.
        weight_scale: ``[out_features, groups]``, floating, or as the driver prepared it.
        weight_zero_point: ``[out_features, groups]``, int8 or float32, or as the driver prepared it; None for 0.
        bias: ``[out_features]``, float32 or of x's dtype, or as the driver prepared it; or None.
        group_size: the columns of a group. A whole row is one group if it is at least ``in_features``.

    Returns:
        ``[..., out_features]``, of x's dtype.
    """
    values = functional.linear(x.float(), dequantize(weight, weight_scale, weight_zero_point, group_size))
    if bias is not None:
        values = values + bias
    return values.to(x.dtype)


def _weight_only_embedding_samples(draw: Draw) -> Iterator[Sample]:
    for place, (width, vocabulary, size) in enumerate(group_shapes()):
        kind = (torch.int64, torch.int32)[place % 2]
        ids = draw.integers(0, vocabulary, (1, 17, 0, 3, 5, 2)[place], dtype=kind)
        for bits in (8, 4):
            weight, scale, zero = quantized_groups(draw, bits, vocabulary, width, group_size=size)
            yield ids, weight, scale, None, width, size, draw.dtype
            scale, zero = scale.to(SCALES[place % 3]), zero if place % 2 else zero.float() + 0.25
            yield ids, weight, scale, zero, width, size, draw.dtype


@op(
    samples=_weight_only_embedding_samples,
    axes={
        "token_ids": "tokens",
        "weight": "vocab_size width|width//8",
        "weight_scale": "vocab_size (width+group_size-1)//group_size",
        "weight_zero_point": "vocab_size (width+group_size-1)//group_size",
        "return": "tokens width",
    },
    dtypes={
        "token_ids": (torch.int32, torch.int64),
        "weight": PACKED,
        "weight_scale": SCALES,
        "weight_zero_point": (torch.int8, torch.float32, "dtype"),
        "return": "dtype",
    },
    rowwise="tokens",
    weights=("weight", "weight_scale", "weight_zero_point"),
    prepared_as="weight_only_linear",
)
def weight_only_embedding(
    token_ids: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor | None,
    width: int,
    group_size: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return row ``token_ids[i]`` of ``(weight - weight_zero_point) * weight_scale`` for each token ``i``.

    It reads a table of embeddings that is also an output projection, in the form that the driver prepared for
    :func:`weight_only_linear`. Computed in float32 and rounded to dtype once. A kernel may round scales and zero points
    to dtype, too.

    Args:
        token_ids: ``[tokens]``, int32 or int64, less than ``vocab_size``, which the caller checks.
        weight: ``[vocab_size, width]`` numbers of 8 or 4 bits, as :func:`weight_only_linear` takes them.
        weight_scale: ``[vocab_size, groups]``, see there.
        weight_zero_point: ``[vocab_size, groups]``, see there; None for 0.
        width: the numbers of a row.
        group_size: those of a group, see there.
        dtype: the dtype of the result, floating.

    Returns:
        ``[tokens, width]``, of dtype.
    """
    zero = None if weight_zero_point is None else weight_zero_point.index_select(0, token_ids)
    rows, scale = weight.index_select(0, token_ids), weight_scale.index_select(0, token_ids)
    return dequantize(rows, scale, zero, group_size).to(dtype)
