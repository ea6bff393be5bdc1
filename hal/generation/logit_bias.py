"""Changes of single logits: biases, stop tokens before their time, and bad words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from torch import Tensor

from hal.generation.request import Request
from hal.step import to_device


def add_biases(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """Return the logits ``[batch, vocab_size]`` with the biases of each row's request, float32 if any has one."""
    vocab_size = logits.shape[-1]
    found = [
        (row, token, bias)
        for row, request in enumerate(requests)
        for token, bias in _biases(request)
        if 0 <= token < vocab_size
    ]
    if not found:
        return logits
    rows, tokens, biases = zip(*found, strict=True)
    places = to_device([rows, tokens], logits.device)
    added = to_device([float(each) for each in biases], logits.device)
    return logits.float().index_put((places[0], places[1]), added, accumulate=True)


def _biases(request: Request) -> Iterator[tuple[int, float]]:
    params = request.params
    if not (params.logit_bias or params.min_new_tokens or request.bad) or request.ended:
        return
    yield from params.logit_bias.items()
    if request.drawn < params.min_new_tokens:
        for token in request.stops:
            yield token, -math.inf
    for *before, last in request.bad:
        if not before or request.generated[-len(before) :] == before:
            yield last, -math.inf
