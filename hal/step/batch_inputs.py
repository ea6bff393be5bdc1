"""Validation of the numbers that a batch is built from."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hal.errors import BatchError
from hal.step.dummies import DUMMY_BLOCK

_LISTS = "pass, for each sequence, a list of token ids, a list of blocks, and one cached length"


def _size(bounds: Any, attribute: attrs.Attribute[int], value: Any) -> None:
    low = 0 if attribute.name == "first_block" else 1
    check_size(attribute.name, value, low)


def check_size(name: str, value: Any, low: int = 1) -> None:
    """Raise BatchError unless a size is an integer of ``low`` or more."""
    if type(value) is not int or value < low:
        raise BatchError(f"{name} is {value!r:.70}, not an integer of {low} or more", f"pass a valid {name}")


@attrs.frozen
class Bounds:
    """Ranges of the numbers in a batch. The defaults are the ranges of its tensors' dtypes.

    Attributes:
        vocab_size: token ids are less than this.
        first_block: the lowest block that a sequence may own.
        num_blocks: blocks are less than this.
        max_length: the maximum length of a sequence, including new tokens.
    """

    vocab_size: int = attrs.field(default=2**63, validator=_size)
    first_block: int = attrs.field(default=0, validator=_size)
    num_blocks: int = attrs.field(default=2**31, validator=_size)
    max_length: int = attrs.field(default=2**31 - 1, validator=_size)


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


def int64_of(name: str, numbers: Any) -> NDArray[np.int64]:
    """Return the argument ``name``, a list of integers, as an array, or raise BatchError.

    numpy itself would cut 0.5 to 0, and take True for 1.
    """
    try:
        if isinstance(numbers, np.ndarray):
            right = numbers.ndim == 1 and numbers.dtype.kind in "iu"
        else:
            kinds = set(map(type, numbers))
            right = kinds == {int} or all(each is int or issubclass(each, np.integer) for each in kinds)
        if right:
            return np.asarray(numbers, np.int64)
    except (TypeError, OverflowError):
        pass
    raise BatchError(f"{name} is {numbers!r:.70}, not a list of integers", f"pass an integer of {name} per sequence")


def rows_of(rows: Sequence[int], size: int) -> Any:
    """Return an index of different rows of ``size``: a slice, which is faster, if they are the first in order.

    Raises:
        BatchError: there is no such row, or it occurs twice.
    """
    # For so few numbers, Python is faster than numpy.
    count = len(rows) if isinstance(rows, list) else length_of("rows", rows)
    if count <= size and [*rows] == [*range(count)] and set(map(type, rows)) <= {int}:
        return slice(count)
    index = int64_of("rows", rows)
    found = index.tolist()
    if found and not (min(found) >= 0 and max(found) < size and len(set(found)) == len(found)):
        raise BatchError(
            f"the rows {found!s:.70} are not different ones of the {size}", "name rows that add() returned, each once"
        )
    return index


def check_slots(slots: Sequence[int], block_size: int) -> None:
    """Raise BatchError if two tokens have the same slot, except in the dummy block."""
    if len(set(slots)) == len(slots):
        return
    token_of: dict[int, int] = {}
    for token, slot in enumerate(slots):
        if token_of.setdefault(slot, token) != token and slot // block_size != DUMMY_BLOCK:
            raise BatchError(
                f"block_ids give the tokens {token_of[slot]} and {token} of the batch the same place in block "
                f"{slot // block_size}",
                "let sequences share only blocks that are already filled",
            )


def check_not_empty(sizes: Mapping[str, int]) -> None:
    """Raise BatchError unless a batch has a token."""
    if not sizes["tokens"] or not sizes["sequences"]:
        raise BatchError(
            f"the batch's token_ids has {sizes['tokens']} tokens, of {sizes['sequences']} sequences",
            "pass at least one token; a data rank without a batch calls Runner.idle",
        )
