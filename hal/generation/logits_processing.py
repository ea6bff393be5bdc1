"""Logits before and after a token is chosen.

Before: penalties, biases, bad words, and masks of allowed tokens. After: the log-probabilities of the chosen token, and
of the most likely ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hal import ops
from hal.errors import ConfigError
from hal.generation.request import Place
from hal.generation.sampling_params import Mask, SamplingParams
from hal.ops.logits import WORD
from hal.step import to_device

NEUTRAL = 0
"""The row of all sequences without penalties. Its counts have no effect."""


def has_penalties(params: SamplingParams) -> bool:
    """Return whether the parameters have a penalty that changes logits."""
    return (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1.0, 0.0, 0.0)


class PenaltyTable:
    """A table of the sequences with penalties: one row each, which the sequence keeps until it ends.

    The counts of generated tokens stay on the device. A step adds its tokens to them in one call.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._counts = torch.zeros(1, vocab_size, dtype=torch.int32, device=device)
        self._prompted = torch.zeros(1, vocab_size, dtype=torch.bool, device=device)
        self._penalties = torch.tensor([[1.0], [0.0], [0.0]], device=device)
        self._free: list[int] = []
        self._rows: list[int] = []
        self._index = torch.empty(0)
        self._one = torch.ones(1, dtype=torch.int32, device=device)

    def add(self, prompt: Sequence[int], params: SamplingParams) -> int:
        """Return a new row for a sequence that has only its prompt, or :data:`NEUTRAL` if it has no penalties."""
        if not has_penalties(params):
            return NEUTRAL
        if not self._free:
            self._grow()
        row = self._free.pop()
        prompted = torch.zeros(self._prompted.shape[1], dtype=torch.bool)
        prompted[torch.tensor(prompt)] = True
        self._prompted[row].copy_(to_device(prompted, self._prompted.device))
        self._counts[row].zero_()
        penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        self._penalties[:, row].copy_(to_device(penalties, self._penalties.device))
        return row

    def remove(self, row: int) -> None:
        """Free the row of a sequence that has ended."""
        if row != NEUTRAL:
            self._free.append(row)

    def penalize(self, logits: Tensor, rows: list[int], drafted: Sequence[Sequence[int]] = ()) -> Tensor:
        """Return penalized logits, float32.

        Args:
            logits: ``[batch, vocab_size]``.
            rows: the row of the sequence of each.
            drafted: for each, drafted tokens, which count as generated.
        """
        index = self._on_device(rows, logits.device)
        counts, prompted = self._counts.index_select(0, index), self._prompted.index_select(0, index)
        if added := [(place, token) for place, tokens in enumerate(drafted) for token in tokens]:
            counts.index_put_(
                tuple(to_device(list(zip(*added, strict=True)), counts.device)), self._one, accumulate=True
            )
        repetition, frequency, presence = self._penalties.index_select(1, index).unbind()
        return ops.penalize(logits, counts, prompted, repetition, frequency, presence)

    def count(self, rows: list[int], tokens: Tensor) -> None:
        """Count generated tokens ``[batch]`` of the sequences with the given rows."""
        self._counts.index_put_((self._on_device(rows, tokens.device), tokens), self._one, accumulate=True)

    def _on_device(self, rows: list[int], device: torch.device) -> Tensor:
        if rows != self._rows:
            self._rows, self._index = rows, to_device(rows, device)
        return self._index

    def _grow(self) -> None:
        """Double the number of rows."""
        rows = self._counts.shape[0]
        self._free = list(range(2 * rows - 1, rows - 1, -1))
        self._counts, self._prompted = (torch.cat((each, each)) for each in (self._counts, self._prompted))
        self._penalties = torch.cat((self._penalties, self._penalties), dim=1)


def add_biases(logits: Tensor, places: Sequence[Place]) -> Tensor:
    """Return the logits ``[batch, vocab_size]`` with the biases of each row's place, float32 if any has one."""
    vocab_size = logits.shape[-1]
    found = [
        (row, token, bias)
        for row, place in enumerate(places)
        for token, bias in _biases(place)
        if 0 <= token < vocab_size
    ]
    if not found:
        return logits
    rows, tokens, biases = zip(*found, strict=True)
    index = to_device([rows, tokens], logits.device)
    added = to_device([float(each) for each in biases], logits.device)
    return logits.float().index_put((index[0], index[1]), added, accumulate=True)


def _biases(place: Place) -> Iterator[tuple[int, float]]:
    request, params = place.request, place.request.params
    if not (params.logit_bias or params.min_new_tokens or request.bad) or request.ended:
        return
    yield from params.logit_bias.items()
    if place.drawn < params.min_new_tokens:
        for token in request.stops:
            yield token, -math.inf
    for *before, last in request.bad:
        if not before or place.generated[-len(before) :] == before:
            yield last, -math.inf


ALL = -1
"""A word that allows all its tokens."""


def allowed_tokens(prompt: int, mask: Mask, generated: Sequence[int], vocab_size: int) -> Tensor:
    """Return what a mask allows, as a row of ``allowed`` of :func:`hal.ops.mask_logits`.

    Args:
        prompt: the index of the prompt, for errors.
        vocab_size: the number of tokens of the model.

    Returns:
        ``[words]``, int32, on the CPU.

    Raises:
        ConfigError: the mask is not an int32 tensor ``[words]`` on the CPU, or allows no token.
    """
    allowed = _checked(mask(generated), -(-vocab_size // WORD), prompt)
    # Bits after the vocabulary do not count.
    last = int(allowed[-1]) & ((1 << (vocab_size - 1) % WORD + 1) - 1)
    if not last and not allowed[:-1].any():
        raise ConfigError(
            f"the mask of prompt {prompt} allows no token after {len(generated)} new tokens",
            "let the mask allow a stop token where the text may end, and give it in stop_token_ids",
        )
    return allowed


def all_tokens(vocab_size: int) -> Tensor:
    """Return the mask that allows all tokens, ``[words]``."""
    return torch.full((-(-vocab_size // WORD),), ALL, dtype=torch.int32)


def _checked(found: Any, words: int, prompt: int) -> Tensor:
    if isinstance(found, Tensor) and found.shape == (words,) and found.dtype is torch.int32 and found.is_cpu:
        return found
    if isinstance(found, Tensor):
        shown = f"{str(found.dtype).removeprefix('torch.')}{list(found.shape)} on {found.device}"
    else:
        shown = f"{found!r:.70}"
    raise ConfigError(
        f"the mask of prompt {prompt} returned {shown}",
        f"return int32[{words}] on cpu: one bit for each token of the model's vocab_size, as in hal.ops.mask_logits",
    )


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
