"""Validation of the numbers that a batch is built from."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from hal.errors import BatchError

_LISTS = "pass, for each sequence, a list of token ids, a list of blocks, and one cached length"


@attrs.frozen
class Bounds:
    """Ranges of the numbers in a batch. The defaults are the ranges of its tensors' dtypes.

    Attributes:
        vocab_size: token ids are less than this.
        first_block: the lowest block that a sequence may own.
        num_blocks: blocks are less than this.
        max_length: the maximum length of a sequence, including new tokens.
    """

    vocab_size: int = 2**63
    first_block: int = 0
    num_blocks: int = 2**31
    max_length: int = 2**31 - 1


def tensor_of(name: str, given: Any) -> Tensor:
    """Return a field's value as a tensor, or raise BatchError if it cannot be converted."""
    try:
        return torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        raise BatchError(
            f"the field {name} is {given!r:.70}, which is not a tensor", "pass a tensor, or lists of numbers"
        ) from None


def length_of(name: str, given: Any) -> int:
    """Return the length of a list, or raise BatchError if the value has no length."""
    try:
        return len(given)
    except TypeError:
        raise BatchError(f"{name} is {given!r:.70}, not a list", _LISTS) from None


_REMEDIES = {
    "token id {}": "check that the tokenizer belongs to the model",
    "block {}": "take blocks from runner.blocks (block 0 is for padding), or raise cache.num_tokens",
    "{} tokens cached": "pass the number of the sequence's tokens in the cache",
}


def integers_of(row: int | Sequence[int], what: str, numbers: Any, low: int, end: int) -> list[int]:
    """Return the numbers of one or several sequences as integers from ``low`` to ``end - 1``, or raise BatchError."""
    if isinstance(numbers, Tensor):
        raise BatchError(f"sequence {row} is a tensor, not a list of integers", _LISTS)
    try:
        kinds = set(map(type, numbers))
        # Lists of int take the fast path: this runs for each sequence of each step.
        found = numbers if kinds == {int} and type(numbers) is list else list(map(operator.index, numbers))
    except TypeError:
        raise BatchError(f"sequence {row} has {what.format(f'{numbers!r:.70}')}, not integers", _LISTS) from None
    if bool in kinds:
        raise BatchError(f"sequence {row} has {what.format(f'{numbers!r:.70}')}, not integers", _LISTS)
    if found and not (min(found) >= low and max(found) < end):
        wrong = next(each for each in found if not low <= each < end)
        raise BatchError(
            f"sequence {row} has {what.format(wrong)}, out of the range {low} to {end - 1}", _REMEDIES[what]
        )
    return found
