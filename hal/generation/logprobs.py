"""Log-probabilities of chosen tokens, and of the most likely ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hal.step import to_device

Logprob = tuple[float | None, tuple[tuple[int, float], ...]]
"""The log-probability of a token, and those of the most likely tokens, in descending order."""


def logprobs_of(logits: Tensor, chosen: Tensor, counts: Sequence[int | None]) -> tuple[Tensor, ...]:
    """Return what :func:`read_logprobs` reads on the host: nothing, if no row asks for log-probabilities.

    Args:
        logits: ``[batch, vocab_size]``.
        chosen: ``[batch]``: the token of each row.
        counts: how many of the most likely tokens each row asks for; None for no log-probability either.
    """
    rows = [row for row, count in enumerate(counts) if count is not None]
    if not rows:
        return ()
    if len(rows) < len(counts):
        index = to_device(rows, logits.device)
        logits, chosen = logits.index_select(0, index), chosen.index_select(0, index)
    values = torch.log_softmax(logits.float(), dim=-1)
    of_chosen = values.gather(1, chosen.to(torch.int64)[:, None])
    top, tokens = values.topk(min(max(filter(None, counts), default=0), values.shape[-1]), dim=-1)
    return torch.cat((of_chosen, top), dim=1), tokens


def read_logprobs(likely: Sequence[Any], counts: Sequence[int | None]) -> list[Logprob]:
    """Return the log-probabilities of each row, from the lists of :func:`logprobs_of`."""
    if not likely:
        return [(None, ())] * len(counts)
    values, tokens = map(iter, likely)
    found: list[Logprob] = []
    for count in counts:
        if count is None:
            found.append((None, ()))
        else:
            of_chosen, *top = next(values)
            found.append((of_chosen, tuple(zip(next(tokens)[:count], top[:count], strict=True))))
    return found
