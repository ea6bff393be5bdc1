"""Selection of the next token."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hal.ops.declaration.constraints import Draw, Sample
from hal.ops.declaration.dtypes import FLOATING
from hal.ops.declaration.operation import op


def _greedy_samples(draw: Draw) -> Iterator[Sample]:
    for batch, vocabulary in ((1, 10), (5, 1000)):
        yield (draw.normal(batch, vocabulary),)
    yield (draw.tensor([[1.0, 3.0, 3.0, 2.0]], draw.dtype),)  # a tie


@op(
    samples=_greedy_samples,
    axes={"logits": "rows vocab_size", "return": "rows"},
    dtypes={"logits": FLOATING, "return": torch.int64},
    rowwise="rows",
)
def greedy_sample(logits: Tensor) -> Tensor:
    """Return the token with the highest logit; of equal ones, the lowest token.

    Args:
        logits: ``[rows, vocab_size]``, floating, free of NaN.

    Returns:
        ``[rows]``, int64.
    """
    best = logits == logits.amax(-1, keepdim=True)
    return best.to(torch.int32).argmax(-1)


def _sample_samples(draw: Draw) -> Iterator[Sample]:
    for batch, vocabulary in ((1, 32), (6, 500)):
        seeds, steps = draw.integers(0, 2**62, batch), draw.integers(0, 4096, batch)
        for temperature, top_k, top_p, min_p in (
            (1.0, 0, 1.0, 0.0),
            (0.0, 0, 1.0, 0.0),
            (0.7, 5, 1.0, 0.0),
            (1.3, 0, 0.8, 0.0),
            (1.0, 0, 1.0, 0.2),
            (0.9, 20, 0.9, 0.05),
        ):
            yield (
                draw.normal(batch, vocabulary, scale=3.0),
                draw.tensor([temperature] * batch, torch.float32),
                draw.tensor([top_k] * batch, torch.int32),
                draw.tensor([top_p] * batch, torch.float32),
                draw.tensor([min_p] * batch, torch.float32),
                seeds,
                steps,
            )


@op(
    samples=_sample_samples,
    axes={
        "logits": "rows vocab_size",
        "temperature": "rows",
        "top_k": "rows",
        "top_p": "rows",
        "min_p": "rows",
        "seed": "rows",
        "step": "rows",
        "return": "rows",
    },
    dtypes={
        "logits": FLOATING,
        "temperature": torch.float32,
        "top_k": torch.int32,
        "top_p": torch.float32,
        "min_p": torch.float32,
        "seed": torch.int64,
        "step": torch.int64,
        "return": torch.int64,
    },
    rowwise="rows",
)
def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seed: Tensor, step: Tensor
) -> Tensor:
    """Draw a token for each sequence, reproducibly: the result depends on the row's arguments only, not on the batch.

    Logits are divided by the temperature. The filters apply in this order: the ``top_k`` most likely tokens; of those,
    the most likely ones whose probabilities add up to ``top_p``, including the one that reaches it; of those, tokens at
    least ``min_p`` times as likely as the most likely one. Equal logits are ranked by token. All is computed in
    float32. The draw selects the token with the lowest ``exponential / probability``, where a hash of seed, step and
    token provides the exponentials.

    Args:
        logits: ``[rows, vocab_size]``, floating, free of NaN.
        temperature: ``[rows]``, float32; 0 selects the most likely token.
        top_k: ``[rows]``, int32; 0 keeps all.
        top_p: ``[rows]``, float32, in (0, 1]; 1 keeps all.
        min_p: ``[rows]``, float32, in [0, 1]; 0 keeps all.
        seed: ``[rows]``, int64: one per sequence.
        step: ``[rows]``, int64: the index of the token in its sequence, so that each step draws differently.

    Returns:
        ``[rows]``, int64.

    Source: Holtzman et al., *The Curious Case of Neural Text Degeneration*, 2019 (top-p); Nguyen et al., *Min-p
    Sampling*, 2024.
    """
    greedy = temperature <= 0
    wide = logits.float()
    # Subtract the maximum, so that a temperature near 0 produces at most one infinity.
    scaled = (wide - wide.amax(-1, keepdim=True)) / torch.where(greedy, 1.0, temperature)[:, None]
    ranked, token = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    limit = torch.where(greedy, 1, torch.where(top_k > 0, top_k.long(), logits.shape[-1]))
    ranked = ranked.masked_fill(rank >= limit[:, None], float("-inf"))

    probability = ranked.softmax(-1)
    before = probability.cumsum(-1) - probability
    keep = (before < top_p[:, None]) | (top_p >= 1)[:, None]
    keep = keep & (probability >= min_p[:, None] * probability[:, :1])
    probability = probability.masked_fill(~keep & (rank > 0), 0.0)

    chosen = (_exponential(seed, step, token) / probability).argmin(-1, keepdim=True)
    return token.gather(-1, chosen).squeeze(-1)


def _exponential(seed: Tensor, step: Tensor, token: Tensor) -> Tensor:
    """Return exponentially distributed float32 numbers that depend only on seed and step (``[rows]``) and token."""
    state = _mix(seed & 0xFFFFFFFF)
    state = _mix(state ^ (seed >> 32 & 0xFFFFFFFF))
    state = _mix(state ^ (step & 0xFFFFFFFF))
    bits = _mix(_mix(state[:, None] ^ token) ^ 0x9E3779B9)
    # Small values decide the draw, where float32 is precise; 1.0 maps to infinity, which is never selected.
    return -torch.log1p(-(bits.float() + 0.5) / 2**32)


def _mix(x: Tensor) -> Tensor:
    """Apply the 32-bit finalizer of MurmurHash3, in int64."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B & 0xFFFFFFFF
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & 0xFFFFFFFF
    return x ^ (x >> 16)
