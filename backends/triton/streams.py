"""Hyper-connections: the weights of each token's residual streams, and their way into a layer's part and back."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hal.ops import HyperConnectionOptions

from .arguments import require, warps
from .interpreter import bound, rounded
from .launching import launch

WIDEST = 1024
"""The most features of a stream that a tile has."""


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _collapse(
    streams,
    products,
    base,
    scale,
    collapsed,
    post,
    mix,
    norm_eps,
    eps,
    magnitude,
    post_eps,
    iterations,
    width: tl.constexpr,
    count: tl.constexpr,
    rows: tl.constexpr,
    most: tl.constexpr,
    block: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    stream, column = tl.arange(0, most), tl.arange(0, block)
    real, start = stream < count, streams + token * count * width
    squares = tl.zeros((most, block), tl.float32)
    for first in range(0, width, block):
        mask = real[:, None] & (first + column < width)[None, :]
        values = tl.load(start + stream[:, None] * width + first + column[None, :], mask=mask, other=0.0)
        squares += values.to(tl.float32) * values.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / (count * width) + norm_eps)

    products += token * rows
    weights = tl.load(products + stream, mask=real, other=0.0) * inverse * tl.load(scale)
    weights = tl.where(real, _sigmoid(weights + tl.load(base + stream, mask=real, other=0.0)) + eps, 0.0)
    for first in range(0, width, block):
        inside = first + column < width
        at, mask = start + stream[:, None] * width + first + column[None, :], real[:, None] & inside[None, :]
        total = tl.sum(tl.load(at, mask=mask, other=0.0).to(tl.float32) * weights[:, None], 0)
        own = rounded(total, collapsed.dtype.element_ty)
        tl.store(collapsed + token * width + first + column, own, mask=inside)

    weights = tl.load(products + count + stream, mask=real, other=0.0) * inverse * tl.load(scale + 1)
    weights = magnitude * _sigmoid(weights + tl.load(base + count + stream, mask=real, other=0.0)) + post_eps
    tl.store(post + token * count + stream, weights, mask=real)

    at, both = stream[:, None] * count + stream[None, :], real[:, None] & real[None, :]
    if rows == 2 * count:
        own = tl.where(stream[:, None] == stream[None, :], 1.0, 0.0)
    else:
        own = tl.load(products + 2 * count + at, mask=both, other=0.0) * inverse * tl.load(scale + 2)
        own += tl.load(base + 2 * count + at, mask=both, other=0.0)
        own = tl.exp(own - tl.max(tl.where(both, own, float("-inf")), 1)[:, None])
        own = tl.where(both, own, 0.0)
        own = tl.where(both, own / tl.sum(own, 1)[:, None] + eps, 0.0)
        own = tl.where(both, own / (tl.sum(own, 0) + eps)[None, :], 0.0)
        for _ in range(bound(iterations) - 1):
            own = tl.where(both, own / (tl.sum(own, 1) + eps)[:, None], 0.0)
            own = tl.where(both, own / (tl.sum(own, 0) + eps)[None, :], 0.0)
    tl.store(mix + token * count * count + at, own, mask=both)


def collapse_streams(
    streams: Tensor, projection: Tensor, base: Tensor, scale: Tensor, options: HyperConnectionOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`hal.ops.collapse_streams`. One launch after torch's product, which the norm then scales."""
    fits = streams.dim() == 3 and projection.dim() == 2 and projection.shape[1] == streams.shape[1] * streams.shape[2]
    fits = fits and projection.shape[0] == base.numel() == options.rows(streams.shape[1])
    fits = fits and scale.shape == (3 if options.iterations else 2,)
    fits = fits and all(each.dtype is torch.float32 for each in (projection, base, scale))
    require(fits, "collapse_streams", streams, projection, base, scale)
    tokens, count, width = streams.shape
    streams = streams.contiguous()
    products = streams.flatten(1).float() @ projection.t()
    collapsed = torch.empty((tokens, width), dtype=streams.dtype, device=streams.device)
    post = torch.empty((tokens, count), dtype=torch.float32, device=streams.device)
    mix = torch.empty((tokens, count, count), dtype=torch.float32, device=streams.device)
    most, block = triton.next_power_of_2(count), min(triton.next_power_of_2(width), WIDEST)
    written = collapsed, post, mix
    factors = options.norm_eps, options.eps, options.magnitude, options.post_eps, options.iterations
    given = streams, products, base.contiguous(), scale.contiguous(), *written, *factors
    sizes = width, count, len(projection), most, block
    if tokens:
        launch("collapse_streams", _collapse, (tokens,), *given, *sizes, written=written, num_warps=warps(most * block))
    return written


@triton.jit
def _expand(
    streams,
    output,
    post,
    mix,
    result,
    width: tl.constexpr,
    count: tl.constexpr,
    most: tl.constexpr,
    block: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    stream, column = tl.arange(0, most), tl.program_id(1) * block + tl.arange(0, block)
    real, inside = stream < count, column < width
    weights = tl.load(post + token * count + stream, mask=real, other=0.0)
    added = tl.load(output + token * width + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((most, block), tl.float32)
    for each in range(count):
        values = tl.load(streams + (token * count + each) * width + column, mask=inside, other=0.0).to(tl.float32)
        share = tl.load(mix + (token * count + each) * count + stream, mask=real, other=0.0)
        total += share[:, None] * values[None, :]
    total += weights[:, None] * added[None, :]
    at, mask = (token * count + stream)[:, None] * width + column[None, :], real[:, None] & inside[None, :]
    tl.store(result + at, rounded(total, result.dtype.element_ty), mask=mask)


def expand_streams(streams: Tensor, output: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    """See :func:`hal.ops.expand_streams`. One launch."""
    fits = streams.dim() == 3 and output.shape == streams[:, 0].shape and output.dtype is streams.dtype
    fits = fits and post.shape == streams.shape[:2] and mix.shape == (*post.shape, streams.shape[1])
    fits = fits and post.dtype is mix.dtype is torch.float32
    require(fits, "expand_streams", streams, output, post, mix)
    tokens, count, width = streams.shape
    result = torch.empty(streams.shape, dtype=streams.dtype, device=streams.device)
    most, block = triton.next_power_of_2(count), min(triton.next_power_of_2(width), WIDEST)
    given = *(each.contiguous() for each in (streams, output, post, mix)), result
    grid, sizes = (tokens, triton.cdiv(width, block)), (width, count, most, block)
    if tokens:
        launch("expand_streams", _expand, grid, *given, *sizes, written=[result], num_warps=warps(most * block))
    return result
