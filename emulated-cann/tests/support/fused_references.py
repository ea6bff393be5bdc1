"""References for fused operations on the CPU in float64: norms, rotary embeddings, attention, and cache writes."""

from __future__ import annotations

import torch
from torch import Tensor

EPSILON = 1e-5


def rms_norm(x: Tensor, gamma: Tensor, beta: Tensor | None = None) -> tuple[Tensor, Tensor]:
    dims = tuple(range(-gamma.dim(), 0))
    rstd = torch.rsqrt(x.double().square().mean(dims, keepdim=True) + EPSILON)
    y = x.double() * rstd * gamma.double()
    return (y if beta is None else y + beta.double()), rstd


def turned(x: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    left, right = x.chunk(2, -1)
    return torch.cat([-right, left], -1)


def rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    return x.double() * cos.double() + turned(x.double(), interleaved) * sin.double()


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    hidden: Tensor,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention of one sequence, [heads, rows, D], in float64.

    A query without keys gives 0, log-sum-exp infinity.
    """
    group = query.shape[0] // key.shape[0]
    key, value = (each.double().repeat_interleave(group, 0) for each in (key, value))
    scores = query.double() @ key.transpose(1, 2) * scale
    if bias is not None:
        scores = scores + bias.double()
    scores = scores.masked_fill(hidden, -torch.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.double()[:, None, None].expand(-1, scores.shape[1], 1)], -1)
        value = torch.nn.functional.pad(value, (0, 0, 0, 1))
    lse = scores.logsumexp(-1)
    weights = torch.where(lse.isneginf()[..., None], 0, (scores - lse[..., None]).exp()) if scores.shape[-1] else scores
    return weights @ value, torch.where(lse.isneginf(), torch.inf, lse)


def in_fractals(cache: Tensor) -> Tensor:
    """Convert [blocks, block_size, H] to [blocks, H / C0, block_size, C0]."""
    width = 32 // cache.element_size()
    return cache.unflatten(-1, (-1, width)).transpose(1, 2).contiguous()


def written(cache: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    """Return [blocks, block_size, H] with the rows at the slots replaced."""
    flat, kept = cache.flatten(0, 1).clone(), slots >= 0
    flat[slots[kept].long()] = rows.flatten(1)[kept].to(cache.dtype)
    return flat.view(cache.shape)
