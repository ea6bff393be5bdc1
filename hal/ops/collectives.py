"""Collective operations: the ranks of a group exchange tensors.

Every rank of the group calls the operation, in the same order, with tensors of the same shape and dtype. A body shows
the meaning for a group whose ranks all hold the same tensor; ``over_shards`` is the meaning for different tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hal.device.group import SOLO, group
from hal.ops.declaration.constraints import Draw, Sample
from hal.ops.declaration.dtypes import FLOATING
from hal.ops.declaration.operation import op


def _samples_of_any_rank(draw: Draw) -> Iterator[Sample]:
    for shape in ((1, 64), (17, 96), (0, 32), (2, 3, 16)):
        yield draw.normal(*shape), SOLO.name
    yield draw.normal(48, 5).t(), SOLO.name  # no unit stride


def _sums(shards: Sequence[Sample]) -> list[Tensor]:
    total = torch.stack([shard[0].float() for shard in shards]).sum(0)
    return [total.to(shards[0][0].dtype)] * len(shards)


@op(
    samples=_samples_of_any_rank,
    axes={"x": "... width", "return": "... width"},
    dtypes={"x": FLOATING, "return": "x"},
    rowwise="...",
    over_shards=_sums,
)
def all_reduce(x: Tensor, group: str) -> Tensor:
    """Return the sum of the ranks' tensors, on every rank.

    Accumulated in x's dtype or a wider one, in any order, but every rank gets the same bits.

    Args:
        x: ``[..., width]``, floating, of the same shape and dtype on every rank.
        group: the name of the group; see :class:`hal.parallel.Group`.

    Returns:
        The shape and dtype of x.
    """
    return x.clone()


def _gathered(shards: Sequence[Sample]) -> list[Tensor]:
    return [torch.cat([shard[0] for shard in shards], -1)] * len(shards)


@op(
    samples=_samples_of_any_rank,
    axes={"x": "... width", "return": "... gathered"},
    dtypes={"x": FLOATING, "return": "x"},
    rowwise="...",
    over_shards=_gathered,
)
def all_gather(x: Tensor, group: str) -> Tensor:
    """Return the ranks' tensors, concatenated along the last dimension in the order of ranks, on every rank.

    Args:
        x: ``[..., width]``, floating, of the same shape and dtype on every rank.
        group: the name of the group; see :class:`hal.parallel.Group`.

    Returns:
        ``[..., size * width]``, of x's dtype, for a group of ``size`` ranks.
    """
    return torch.cat([x] * _size(group), -1)


def _gather_rows_samples(draw: Draw) -> Iterator[Sample]:
    for shape in ((1, 64), (17, 96), (0, 32)):
        yield draw.normal(*shape), SOLO.name
    yield draw.normal(48, 5).t(), SOLO.name  # no unit stride
    for dtype in (torch.int32, torch.int64):
        yield draw.integers(-9, 1 << 30, 3, 8, dtype=dtype), SOLO.name


def _gathered_rows(shards: Sequence[Sample]) -> list[Tensor]:
    return [torch.cat([shard[0] for shard in shards])] * len(shards)


@op(
    samples=_gather_rows_samples,
    axes={"x": "tokens width", "return": "gathered width"},
    dtypes={"x": (FLOATING, torch.int32, torch.int64), "return": "x"},
    rowwise=None,
    over_shards=_gathered_rows,
)
def all_gather_rows(x: Tensor, group: str) -> Tensor:
    """Return the rows of the ranks' tensors, in the order of ranks, on every rank.

    Args:
        x: ``[tokens, width]``, floating, int32 or int64, of the same shape and dtype on every rank.
        group: the name of the group; see :class:`hal.parallel.Group`.

    Returns:
        ``[size * tokens, width]``, of x's dtype, for a group of ``size`` ranks.
    """
    return torch.cat([x] * _size(group))


def _rows_to_divide(draw: Draw) -> Iterator[Sample]:
    for shape in ((1, 64), (16, 96), (0, 32)):
        yield draw.normal(*shape), SOLO.name
    yield draw.normal(48, 6).t(), SOLO.name  # no unit stride


def _scattered(shards: Sequence[Sample]) -> list[Tensor]:
    return list(_sums(shards)[0].chunk(len(shards)))


@op(
    samples=_rows_to_divide,
    axes={"x": "tokens width", "return": "kept width"},
    dtypes={"x": FLOATING, "return": "x"},
    rowwise=None,
    over_shards=_scattered,
)
def reduce_scatter(x: Tensor, group: str) -> Tensor:
    """Return this rank's rows of the sum of the ranks' tensors.

    Accumulated in x's dtype or a wider one, in any order.

    Args:
        x: ``[tokens, width]``, floating, of the same shape and dtype on every rank. The size of the group divides
            ``tokens``.
        group: the name of the group; see :class:`hal.parallel.Group`.

    Returns:
        ``[tokens / size, width]``, of x's dtype: consecutive rows, in the order of ranks.
    """
    return x[: x.shape[0] // _size(group)].clone()


def _exchanged(shards: Sequence[Sample]) -> list[Tensor]:
    parts = [shard[0].chunk(len(shards)) if shard[0].shape[0] else [shard[0]] * len(shards) for shard in shards]
    return [torch.cat(column) for column in zip(*parts, strict=True)]


@op(
    samples=_rows_to_divide,
    axes={"x": "tokens width", "return": "tokens width"},
    dtypes={"x": FLOATING, "return": "x"},
    rowwise=None,
    over_shards=_exchanged,
)
def all_to_all(x: Tensor, group: str) -> Tensor:
    """Give each rank an equal part of the rows, and return the parts that the ranks give to this one.

    Args:
        x: ``[size * rows, width]`` for a group of ``size`` ranks, floating, of the same shape and dtype on every rank.
            Its part ``i`` of ``rows`` consecutive rows is for rank ``i``.
        group: the name of the group; see :class:`hal.parallel.Group`.

    Returns:
        ``[size * rows, width]``, of x's dtype: the part from each rank, in the order of ranks.
    """
    rows = x.shape[0] // _size(group)
    start = _rank(group) * rows
    return x[start : start + rows].repeat(_size(group), 1)


def _size(name: str) -> int:
    return group(name).size


def _rank(name: str) -> int:
    return group(name).rank
