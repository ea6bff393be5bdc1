"""The choice of experts for each token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hal.ops.experts.routing import SMALLEST_SUM

from ..arguments import require, unit_stride, warps
from ..interpreter import rounded

LOWEST = tl.constexpr(-0x7FFFFFFFFFFFFFFF)
"""A key below that of any number."""


@triton.jit
def _keys(values, rank):
    """Return int64 keys that sort like ``values``, with NaN above infinity; of equal values, the lower rank first.

    No value may be -0, which would sort below 0. None is: a score is never -0, so its sum with a bias is not either.
    """
    # The bits of a negative number sort in reverse.
    bits = values.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (tl.where(values != values, 0x7FFFFFFF, ordered).to(tl.int64) << 32) + (0x7FFFFFFF - rank)


@triton.jit
def _ranks(keys):
    return 0x7FFFFFFF - (keys & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _values(keys):
    ordered = (keys >> 32).to(tl.int32)
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["count"])
def _route(
    logits,
    bias,
    weights,
    experts,
    count,
    logits_row,
    scale,
    smallest_sum,
    top_k: tl.constexpr,
    sigmoid: tl.constexpr,
    renormalize: tl.constexpr,
    num_groups: tl.constexpr,
    group_size: tl.constexpr,
    top_groups: tl.constexpr,
    group_best: tl.constexpr,
    tokens: tl.constexpr,
    groups: tl.constexpr,
    members: tl.constexpr,
    slots: tl.constexpr,
):
    """Choose the experts of ``tokens`` tokens. A group's columns are padded to ``members``, a power of two."""
    token = tl.program_id(0).to(tl.int64) * tokens + tl.arange(0, tokens)
    column = tl.arange(0, groups * members)
    expert = (column // members) * group_size + column % members
    there = (column // members < num_groups) & (column % members < group_size)
    mask = (token < count)[:, None] & there[None, :]
    values = tl.load(logits + token[:, None] * logits_row + expert[None, :], mask=mask, other=float("-inf"))
    values = values.to(tl.float32)
    if sigmoid:
        # IEEE division, here and below: an approximate one could change the order of scores.
        scores = tl.div_rn(tl.full(values.shape, 1.0, tl.float32), 1.0 + tl.exp(-values))
    else:
        # A maximum ignores NaN, but the sum does not.
        powers = tl.exp(values - tl.max(values, 1)[:, None])
        scores = tl.div_rn(powers, tl.zeros_like(powers) + tl.sum(powers, 1)[:, None])
    choice = scores
    if bias is not None:
        choice += tl.load(bias + expert, mask=there, other=0.0)[None, :]
    keys = tl.where(there[None, :], _keys(choice, expert[None, :]), LOWEST)

    if num_groups > 1:
        group = tl.arange(0, groups)
        parts = tl.reshape(keys, [tokens, groups, members])
        first = tl.max(parts, 2)
        best = _values(first)
        if group_best > 1:
            best += _values(tl.max(tl.where(parts == first[:, :, None], LOWEST, parts), 2))
        group_keys = tl.where((group < num_groups)[None, :], _keys(best, group[None, :]), LOWEST)
        kept = tl.zeros([tokens, groups], tl.int32)
        for _ in range(top_groups):
            found = group_keys == tl.max(group_keys, 1)[:, None]
            kept = tl.where(found, 1, kept)
            group_keys = tl.where(found, LOWEST, group_keys)
        kept = tl.reshape(tl.broadcast_to(kept[:, :, None], [tokens, groups, members]), [tokens, groups * members])
        excluded = _keys(tl.full(choice.shape, float("-inf"), tl.float32), expert[None, :])
        keys = tl.where(there[None, :] & (kept == 0), excluded, keys)

    slot = tl.arange(0, slots)
    chosen = tl.zeros([tokens, slots], tl.int32)
    weight = tl.zeros([tokens, slots], tl.float32)
    for index in range(top_k):
        highest = tl.max(keys, 1)
        found = keys == highest[:, None]
        chosen = tl.where(slot[None, :] == index, _ranks(highest)[:, None], chosen)
        weight = tl.where(slot[None, :] == index, tl.sum(tl.where(found, scores, 0.0), 1)[:, None], weight)
        keys = tl.where(found, LOWEST, keys)
    if renormalize:
        weight = tl.div_rn(weight, tl.zeros_like(weight) + (tl.sum(weight, 1) + smallest_sum)[:, None])
    at = token[:, None] * top_k + slot[None, :]
    filled = (token < count)[:, None] & (slot < top_k)[None, :]
    tl.store(weights + at, rounded(weight * scale, weights.dtype.element_ty), mask=filled)
    tl.store(experts + at, chosen, mask=filled)


def topk_route(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    sigmoid: bool,
    renormalize: bool,
    scale: float,
    num_groups: int,
    top_groups: int,
    group_best: int,
) -> tuple[Tensor, Tensor]:
    """See :func:`hal.ops.topk_route`. Scores are sorted with their experts as integers, so that ties are exact."""
    fits = logits.dim() == 2 and logits.shape[1] > 0 and num_groups > 0 and logits.shape[1] % num_groups == 0
    fits = fits and 0 < top_groups <= num_groups and group_best in (1, 2)
    fits = fits and 0 < top_k <= logits.shape[1] // num_groups * top_groups
    if bias is not None:
        fits = fits and bias.shape == logits.shape[1:] and bias.dtype is torch.float32
        bias = bias.contiguous()
    require(fits, "topk_route", logits, *([] if bias is None else [bias]))
    count, num_experts = logits.shape
    logits, group_size = unit_stride(logits), num_experts // num_groups
    weights = torch.empty((count, top_k), dtype=logits.dtype, device=logits.device)
    experts = torch.empty((count, top_k), dtype=torch.int32, device=logits.device)
    groups, members = triton.next_power_of_2(num_groups), triton.next_power_of_2(group_size)
    tokens = max(256 // (groups * members), 1)
    tensors = logits, bias, weights, experts
    sizes = count, logits.stride(0), scale, SMALLEST_SUM, top_k, sigmoid, renormalize, num_groups, group_size
    constants = top_groups, min(group_best, group_size), tokens, groups, members, triton.next_power_of_2(top_k)
    _route[(triton.cdiv(count, tokens),)](*tensors, *sizes, *constants, num_warps=warps(tokens * groups * members))
    return weights, experts
