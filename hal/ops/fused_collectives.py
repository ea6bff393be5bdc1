"""Collectives fused with the projection or the norm beside them.

As for every fused operation, the body is the pattern that finds it in a graph. As for every collective, the body is the
meaning for ranks that all hold the same tensors, and ``over_shards`` the meaning for different ones.

``linear_all_reduce`` ends a layer whose ranks split ``in_features``. The forms for sequence parallelism keep only a
part of the tokens on each rank between the layers: ``all_gather_linear`` begins such a layer, ``linear_reduce_scatter``
ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional

from hal.device.group import SOLO
from hal.ops.collectives import all_gather_rows, all_reduce, reduce_scatter
from hal.ops.declaration.constraints import Draw, Sample
from hal.ops.declaration.dtypes import FLOATING
from hal.ops.declaration.operation import fused_op, operation
from hal.ops.norm import add_rms_norm
from hal.ops.projection import linear

WEIGHTS = {"weight": "out_features in_features", "bias": "out_features"}
"""The axes of the weights of a projection."""
DTYPES = {"x": FLOATING, "weight": "x", "bias": "x", "return": "x"}


def _over_shards(collective: Callable[..., Any], shards: Sequence[Sample]) -> Sequence[Any]:
    found = operation(collective).over_shards
    assert found is not None
    return found(shards)


def _products(shards: Sequence[Sample]) -> list[Sample]:
    return [(functional.linear(x, weight, bias), group) for x, weight, bias, group in shards]


def _linear_samples(draw: Draw, rows: Sequence[int]) -> Iterator[Sample]:
    for count, width, out in zip(rows, (64, 128, 32), (96, 64, 16), strict=True):
        for bias in (None, draw.normal(out)):
            yield draw.normal(count, width), draw.normal(out, width, scale=width**-0.5), bias, SOLO.name


def _linear_all_reduce_samples(draw: Draw) -> Iterator[Sample]:
    yield from _linear_samples(draw, (1, 17, 0))
    yield draw.normal(2, 3, 32), draw.normal(48, 32, scale=0.125), None, SOLO.name
    yield draw.normal(64, 3).t(), draw.normal(32, 64, scale=0.125), None, SOLO.name  # no unit stride


@fused_op(
    samples=_linear_all_reduce_samples,
    axes={"x": "... in_features", **WEIGHTS, "return": "... out_features"},
    dtypes=DTYPES,
    rowwise="...",
    over_shards=lambda shards: _over_shards(all_reduce, _products(shards)),
)
def linear_all_reduce(x: Tensor, weight: Tensor, bias: Tensor | None, group: str) -> Tensor:
    """Return the sum over the ranks of :func:`linear`: ``all_reduce(linear(x, weight, bias), group)``.

    A kernel may add the ranks' products before it rounds them. Every rank gets the same bits.

    Args:
        x: this rank's features, ``[..., in_features]``, floating, of the same shape and dtype on every rank.
        weight: ``[out_features, in_features]``, of x's dtype, as :func:`linear` takes it.
        bias: ``[out_features]``, of x's dtype, or None. Each rank adds its own, so all but one hold zeros.
        group: the name of the group; see :class:`hal.parallel.Group`.

    Returns:
        ``[..., out_features]``, of x's dtype.
    """
    return all_reduce(linear(x, weight, bias), group)


@fused_op(
    samples=partial(_linear_samples, rows=(1, 17, 0)),
    axes={"x": "tokens in_features", **WEIGHTS, "return": "gathered out_features"},
    dtypes=DTYPES,
    rowwise=None,
    over_shards=lambda shards: [
        functional.linear(gathered, weight, bias)
        for gathered, (_, weight, bias, _) in zip(
            _over_shards(all_gather_rows, [(shard[0], shard[3]) for shard in shards]), shards, strict=True
        )
    ],
)
def all_gather_linear(x: Tensor, weight: Tensor, bias: Tensor | None, group: str) -> Tensor:
    """Return :func:`linear` of the rows of all ranks: ``linear(all_gather_rows(x, group), weight, bias)``.

    Args:
        x: this rank's rows, ``[tokens, in_features]``, floating, of the same shape and dtype on every rank.
        weight: ``[out_features, in_features]``, of x's dtype, as :func:`linear` takes it.
        bias: ``[out_features]``, of x's dtype, or None.
        group: the name of the group; see :class:`hal.parallel.Group`.

    Returns:
        ``[size * tokens, out_features]``, of x's dtype, for a group of ``size`` ranks.
    """
    return linear(all_gather_rows(x, group), weight, bias)


@fused_op(
    samples=partial(_linear_samples, rows=(4, 16, 0)),
    axes={"x": "tokens in_features", **WEIGHTS, "return": "kept out_features"},
    dtypes=DTYPES,
    rowwise=None,
    over_shards=lambda shards: _over_shards(reduce_scatter, _products(shards)),
)
def linear_reduce_scatter(x: Tensor, weight: Tensor, bias: Tensor | None, group: str) -> Tensor:
    """Return this rank's rows of the sum over the ranks of :func:`linear`.

    This is ``reduce_scatter(linear(x, weight, bias), group)``. A kernel may add the products before it rounds them.

    Args:
        x: this rank's features, ``[tokens, in_features]``, floating, of the same shape and dtype on every rank. The
            size of the group divides ``tokens``.
        weight: ``[out_features, in_features]``, of x's dtype, as :func:`linear` takes it.
        bias: ``[out_features]``, of x's dtype, or None. Each rank adds its own, so all but one hold zeros.
        group: the name of the group; see :class:`hal.parallel.Group`.

    Returns:
        ``[tokens / size, out_features]``, of x's dtype: consecutive rows, in the order of ranks.
    """
    return reduce_scatter(linear(x, weight, bias), group)


def _norm_samples(draw: Draw) -> Iterator[Sample]:
    for shape in ((1, 64), (7, 96), (2, 3, 128)):
        yield draw.normal(*shape), draw.normal(*shape), draw.normal(shape[-1]), 1e-6, SOLO.name


def _summed_and_normed(shards: Sequence[Sample]) -> list[Any]:
    sums = _over_shards(all_reduce, [(shard[0], shard[4]) for shard in shards])
    norm = operation(add_rms_norm).reference
    return [norm(total, *shard[1:4]) for total, shard in zip(sums, shards, strict=True)]


@fused_op(
    samples=_norm_samples,
    axes={"x": "... width", "residual": "... width", "weight": "width", "return": ("... width", "... width")},
    dtypes={"x": FLOATING, "residual": "x", "weight": "x", "return": ("x", "x")},
    rowwise="...",
    over_shards=_summed_and_normed,
)
def all_reduce_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, group: str
) -> tuple[Tensor, Tensor]:
    """Add the ranks' tensors, then apply :func:`add_rms_norm`. The first sum is rounded to x's dtype, too.

    Args:
        x: ``[..., width]``, floating, of the same shape and dtype on every rank.
        residual: of x's shape and dtype, the same on every rank.
        weight: ``[width]``, of x's dtype, the same on every rank.
        eps: added to the mean square.
        group: the name of the group; see :class:`hal.parallel.Group`.

    Returns:
        The norm of the sum with the residual, and that sum, both of x's shape and dtype.
    """
    return add_rms_norm(all_reduce(x, group), residual, weight, eps)
