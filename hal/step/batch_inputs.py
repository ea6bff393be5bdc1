"""The numbers that a batch is built from, checked."""

from __future__ import annotations

import operator
from typing import Any

import attrs
import torch
from torch import Tensor

from hal.errors import BatchError

_LISTS = "give a list of integers per sequence, of its tokens and of its blocks, and one length cached of each"


@attrs.frozen
class Bounds:
    """What the numbers that a batch is built from may be. The defaults are what its tensors can hold.

    Attributes:
        vocab_size: token ids are below it.
        first_block: blocks are at least it,
        num_blocks: and below it.
        max_length: a sequence's tokens, new ones included.
    """

    vocab_size: int = 2**63
    first_block: int = 0
    num_blocks: int = 2**31
    max_length: int = 2**31 - 1


def tensor_of(name: str, given: Any) -> Tensor:
    """Return what was given for a field, as a tensor. Raise BatchError if it is none."""
    try:
        return torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        raise BatchError(f"the field {name} is {given!r:.70}", "give a tensor, or lists of numbers") from None


def length_of(name: str, given: Any) -> int:
    """Return the length of a list. Raise BatchError if it has none."""
    try:
        return len(given)
    except TypeError:
        raise BatchError(f"{name} is {given!r:.70}, not a list", _LISTS) from None


_REMEDIES = {
    "token id {}": "check that tokenizer and model belong together",
    "block {}": "take blocks from runner.blocks (block 0 is for padding), or raise cache.num_tokens for more of them",
    "{} tokens cached": "give the number of tokens that the cache holds of it",
}


def integers_of(row: int, what: str, numbers: Any, low: int, end: int) -> list[int]:
    """Return a sequence's numbers, as integers from ``low`` to below ``end``. Raise BatchError if one is not."""
    if isinstance(numbers, Tensor):
        raise BatchError(f"sequence {row} is given as a tensor", _LISTS)
    try:
        kinds = set(map(type, numbers))
        # Most are what they should be, and are looked at as little as can be: this is done for each sequence of a step.
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
