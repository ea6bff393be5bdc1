"""Penalties of running sequences, and the tokens that they apply to, on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hal import ops
from hal.generation.sampling_params import SamplingParams
from hal.step import to_device

NEUTRAL = 0
"""The row of all sequences without penalties. Its counts have no effect."""


def has_penalties(params: SamplingParams) -> bool:
    """Return whether the parameters have a penalty that changes logits."""
    return (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1.0, 0.0, 0.0)


class PenaltyTable:
    """A table of the sequences with penalties: one row each, which the sequence keeps until it ends.

    The counts of generated tokens stay on the device. A step adds its tokens to them in one call.

    Args:
        vocab_size: the number of tokens.
        device: the device of the logits.
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

    def penalize(self, logits: Tensor, rows: list[int]) -> Tensor:
        """Return the penalized logits ``[batch, vocab_size]``, float32, of the sequences with the given rows."""
        if rows != self._rows:
            self._rows = rows
            self._index = to_device(rows, logits.device)
        counts, prompted = self._counts.index_select(0, self._index), self._prompted.index_select(0, self._index)
        repetition, frequency, presence = self._penalties.index_select(1, self._index).unbind()
        return ops.penalize(logits, counts, prompted, repetition, frequency, presence)

    def count(self, tokens: Tensor) -> None:
        """Count the tokens ``[batch]`` chosen from the logits that :meth:`penalize` returned last."""
        self._counts.index_put_((self._index, tokens), self._one, accumulate=True)

    def _grow(self) -> None:
        """Double the number of rows."""
        rows = self._counts.shape[0]
        self._free = list(range(2 * rows - 1, rows - 1, -1))
        self._counts, self._prompted = (torch.cat((each, each)) for each in (self._counts, self._prompted))
        self._penalties = torch.cat((self._penalties, self._penalties), dim=1)
