"""The order of assignments by expert, and the copies of rows into it and out of it.

The order is stable and computed by counting: a histogram of each block of assignments, then the rank of each one. It
needs one launch for few assignments and two for many, whatever the experts are.
"""

from __future__ import annotations

import attrs
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..arguments import require, unit_stride, warps
from ..interpreter import bound, rounded

CHUNK = 32
"""The number of experts, or of assignments, that a block is compared with at once."""


@triton.jit(do_not_specialize=["count"])
def _histogram(experts, histograms, count, num_experts: tl.constexpr, block: tl.constexpr, chunk: tl.constexpr):
    program = tl.program_id(0)
    index = program * block + tl.arange(0, block)
    mine = tl.load(experts + index, mask=index < count, other=-1)
    for first in range(0, num_experts, chunk):
        expert = first + tl.arange(0, chunk)
        found = tl.sum((mine[:, None] == expert[None, :]).to(tl.int32), 0)
        tl.store(histograms + program * num_experts + expert, found, mask=expert < num_experts)


@triton.jit(do_not_specialize=["count", "blocks"])
def _rank(
    experts,
    histograms,
    positions,
    tokens,
    counts,
    count,
    blocks,
    top_k: tl.constexpr,
    num_experts: tl.constexpr,
    block: tl.constexpr,
    chunk: tl.constexpr,
):
    """Write the position of each assignment of a block, and the token at that position.

    ``histograms`` is None if the block holds all assignments.
    """
    program = tl.program_id(0)
    index = program * block + tl.arange(0, block)
    mine = tl.load(experts + index, mask=index < count, other=-1)
    # Those of lower experts, and those of the same expert in earlier blocks.
    position = tl.zeros([block], tl.int32)
    lower = 0
    for first in range(0, num_experts, chunk):
        expert = first + tl.arange(0, chunk)
        own = mine[:, None] == expert[None, :]
        if histograms is None:
            total = tl.sum(own.to(tl.int32), 0)
            before = tl.zeros([chunk], tl.int32)
        else:
            total = tl.zeros([chunk], tl.int32)
            before = tl.zeros([chunk], tl.int32)
            for start in range(0, bound(blocks), chunk):
                other = start + tl.arange(0, chunk)
                at = histograms + other[:, None] * num_experts + expert[None, :]
                found = tl.load(at, mask=(other < blocks)[:, None] & (expert < num_experts)[None, :], other=0)
                total += tl.sum(found, 0)
                before += tl.sum(tl.where((other < program)[:, None], found, 0), 0)
        if program == 0:
            tl.store(counts + expert, total.to(tl.int64), mask=expert < num_experts)
        begin = lower + tl.cumsum(total, 0) - total + before
        position += tl.sum(tl.where(own, begin[None, :], 0), 1)
        lower += tl.sum(total, 0)
    # Those of the same expert that come earlier in this block.
    for start in range(0, bound(tl.minimum(count - program * block, block)), chunk):
        other = program * block + start + tl.arange(0, chunk)
        expert = tl.load(experts + other, mask=other < count, other=-2)
        earlier = (mine[:, None] == expert[None, :]) & (other[None, :] < index[:, None])
        position += tl.sum(earlier.to(tl.int32), 1)
    tl.store(positions + index, position, mask=index < count)
    if tokens is not None:
        tl.store(tokens + position, index // top_k, mask=index < count)


@attrs.frozen
class Order:
    """The assignments in the order of their experts.

    Attributes:
        positions: the row of each assignment, int32 ``[tokens * top_k]``.
        tokens: the token of each row, int32 ``[tokens * top_k]``; None if it was not requested.
        counts: the number of rows of each expert, int64 ``[num_experts]``.
    """

    positions: Tensor
    tokens: Tensor | None
    counts: Tensor


def order(experts: Tensor, num_experts: int, *, tokens: bool) -> Order:
    """Sort assignments by expert, then by token, without a wait for the device.

    Args:
        experts: ``[tokens, top_k]``, int32.
        num_experts: the number of experts.
        tokens: whether to return each row's token.
    """
    assigned, count = experts.contiguous(), experts.numel()
    positions = torch.empty(count, dtype=torch.int32, device=experts.device)
    sources = torch.empty(count, dtype=torch.int32, device=experts.device) if tokens else None
    counts = torch.empty(num_experts, dtype=torch.int64, device=experts.device)
    # One block without assignments writes the counts, which are 0.
    block = 64 if count <= 64 else 512
    blocks = max(triton.cdiv(count, block), 1)
    histograms = None
    if blocks > 1:
        histograms = torch.empty((blocks, num_experts), dtype=torch.int32, device=experts.device)
        _histogram[(blocks,)](assigned, histograms, count, num_experts, block, CHUNK, num_warps=warps(block * CHUNK))
    tensors = assigned, histograms, positions, sources, counts
    sizes = count, blocks, experts.shape[1], num_experts, block, CHUNK
    _rank[(blocks,)](*tensors, *sizes, num_warps=warps(block * CHUNK))
    return Order(positions, sources, counts)


@triton.jit
def _spread(x, positions, result, x_row, width: tl.constexpr, top_k: tl.constexpr, block: tl.constexpr):
    """Copy a part of a token's row to each of its assignments' rows."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    values = tl.load(x + token * x_row + column, mask=column < width)
    for index in range(top_k):
        row = tl.load(positions + token * top_k + index).to(tl.int64)
        tl.store(result + row * width + column, values, mask=column < width)


def expert_permute(x: Tensor, experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`hal.ops.expert_permute`."""
    require_routing("expert_permute", x, experts)
    x, found = unit_stride(x), order(experts, num_experts, tokens=False)
    (tokens, width), top_k = x.shape, experts.shape[1]
    result = torch.empty((tokens * top_k, width), dtype=x.dtype, device=x.device)
    block = min(triton.next_power_of_2(width), 1024)
    _spread[tokens, triton.cdiv(width, block)](
        x, found.positions, result, x.stride(0), width, top_k, block, num_warps=warps(block)
    )
    return result, found.counts, found.positions


@triton.jit
def _gather(
    rows,
    positions,
    weights,
    result,
    row_stride,
    weights_row,
    width: tl.constexpr,
    top_k: tl.constexpr,
    block: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    total = tl.zeros([block], tl.float32)
    for index in range(top_k):
        row = tl.load(positions + token * top_k + index).to(tl.int64)
        weight = tl.load(weights + token * weights_row + index).to(tl.float32)
        total += weight * tl.load(rows + row * row_stride + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(result + token * width + column, rounded(total, result.dtype.element_ty), mask=column < width)


def expert_unpermute(rows: Tensor, positions: Tensor, weights: Tensor) -> Tensor:
    """See :func:`hal.ops.expert_unpermute`."""
    fits = rows.dim() == weights.dim() == 2 and positions.shape == (weights.numel(),) == rows.shape[:1]
    fits = fits and positions.dtype is torch.int32 and weights.dtype in (rows.dtype, torch.float32)
    require(fits, "expert_unpermute", rows, positions, weights)
    rows, weights, positions = unit_stride(rows), unit_stride(weights), positions.contiguous()
    (tokens, top_k), width = weights.shape, rows.shape[1]
    result = torch.empty((tokens, width), dtype=rows.dtype, device=rows.device)
    block = min(triton.next_power_of_2(width), 1024)
    _gather[tokens, triton.cdiv(width, block)](
        rows, positions, weights, result, rows.stride(0), weights.stride(0), width, top_k, block, num_warps=warps(block)
    )
    return result


def require_routing(operation: str, x: Tensor, experts: Tensor) -> None:
    """Check that ``experts`` are int32 ``[tokens, top_k]`` for the rows of ``x``.

    Raises:
        OperationError: they are not.
    """
    fits = x.dim() == experts.dim() == 2 and experts.shape[0] == x.shape[0] and experts.dtype is torch.int32
    require(fits, operation, x, experts)
