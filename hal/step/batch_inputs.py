"""Validation of the numbers that a batch is built from, and of the tensors that an engine made."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hal.errors import BatchError, nearest
from hal.step.fields import DUMMY_BLOCK, fields_of

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


def checked_fields(batch_type: type[Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the fields of a batch class, and the host twins of its base class, from the tensors that were given.

    Args:
        batch_type: the class.
        tensors: the tensors, by field. A host twin may be left out if its field is on the CPU.

    Raises:
        BatchError: a field is missing or unknown, or a tensor has the wrong dtype or is on the wrong device.
    """
    declared = fields_of(batch_type)
    if unknown := [name for name in tensors if name not in declared]:
        raise BatchError(f"{batch_type.__name__} has no field {unknown[0]!r}", nearest(unknown[0], declared))
    found = dict(tensors)
    for name, each in declared.items():
        twin = found.get(each.twin_of or "")
        if name not in found and twin is not None and twin.is_cpu:
            found[name] = twin
        if name not in found and each.default is None:
            raise BatchError(f"the field {name} of {batch_type.__name__} is missing", f"pass a tensor {each}")
    device = found["token_ids"].device
    for name, tensor in found.items():
        wanted = torch.device("cpu") if declared[name].twin_of else device
        if tensor.dtype != declared[name].dtype or tensor.device != wanted:
            raise BatchError(
                f"the field {name} is {tensor.dtype} on {tensor.device}, not {declared[name].dtype} on {wanted}",
                "convert it in the engine, where it is made",
            )
    return found


def check_values(batch: Any, block_size: int, bounds: Bounds) -> None:
    """Raise BatchError if the values of a batch contradict each other, or are out of range.

    Values on a device are not read, because the host would wait for the device in each step: only the host twins are.

    Args:
        batch: the batch, whose shapes and dtypes are right.
        block_size: tokens per block.
        bounds: the ranges.
    """
    starts, lengths = batch.query_start_loc_host, batch.kv_lens_host
    for name in ("query_start_loc", "kv_lens"):
        tensor, twin = getattr(batch, name), getattr(batch, f"{name}_host")
        if tensor is not twin and tensor.is_cpu and not torch.equal(tensor, twin):
            raise BatchError(
                f"{name} is {tensor.tolist()!s:.70}, and {name}_host is {twin.tolist()!s:.70}",
                f"pass a copy of {name} as {name}_host, or leave it out",
            )
    counts = starts.diff()
    if starts[0] != 0 or starts[-1] != batch.num_tokens or bool((counts < 1).any()):
        raise BatchError(
            f"query_start_loc is {starts.tolist()!s:.70}, for {batch.num_tokens} tokens",
            "let it rise from 0 to the number of tokens, by at least one for each sequence",
        )
    most = min(bounds.max_length, batch.block_table.shape[1] * block_size)
    wrong = (lengths < counts) | (lengths > most)
    if bool(wrong.any()):
        row = int(wrong.int().argmax())
        raise BatchError(
            f"sequence {row} has the length {int(lengths[row])}, with {int(counts[row])} new tokens, in kv_lens; the "
            f"model and the block table take {most}",
            "pass the length of each sequence, including its new tokens, and a block table that holds it",
        )
    needed = torch.arange(batch.block_table.shape[1]) * block_size < lengths.unsqueeze(1)
    ranges: dict[str, tuple[Tensor, int, int]] = {
        "token_ids": (batch.token_ids, 0, bounds.vocab_size),
        "positions": (batch.positions, 0, bounds.max_length),
        "slot_mapping": (batch.slot_mapping, bounds.first_block * block_size, bounds.num_blocks * block_size),
    }
    if batch.block_table.is_cpu:
        ranges["block_table"] = (batch.block_table[needed], bounds.first_block, bounds.num_blocks)
    for name, (tensor, low, end) in ranges.items():
        if tensor.is_cpu and tensor.numel() and not (int(tensor.min()) >= low and int(tensor.max()) < end):
            value = next(each for each in tensor.tolist() if not low <= each < end)
            raise BatchError(
                f"{name} has {value}, out of the range {low} to {end - 1}", "use the model's tokenizer and own blocks"
            )
    _check_places(batch, block_size, bounds.first_block, counts)


def _check_places(batch: Any, block_size: int, first_block: int, counts: Tensor) -> None:
    """Raise BatchError unless the positions end at the lengths, and each token has the slot that the block table gives.

    Slots of the dummy block may be any, if ``bounds`` allow that block: padding writes there.
    """
    row = torch.arange(len(counts)).repeat_interleave(counts)
    ends = batch.query_start_loc_host[1:]
    expected = torch.arange(batch.num_tokens) + (batch.kv_lens_host - ends).long()[row]
    if batch.positions.is_cpu and (at := _first(batch.positions != expected)) is not None:
        raise BatchError(
            f"positions has {int(batch.positions[at])} for token {at} of the batch, and the length "
            f"{int(batch.kv_lens_host[row[at]])} of sequence {int(row[at])} in kv_lens gives it {int(expected[at])}",
            "count positions from 0 in each sequence, and let its last new token have the length - 1",
        )
    slots = batch.slot_mapping
    if not slots.is_cpu:
        return
    own = slots >= max(first_block, DUMMY_BLOCK + 1) * block_size
    if batch.block_table.is_cpu:
        block = batch.block_table[row, expected // block_size]
        placed = block * block_size + expected % block_size
        if (at := _first(own & (slots != placed))) is not None:
            raise BatchError(
                f"slot_mapping has {int(slots[at])} for token {at} of the batch, and block_table gives position "
                f"{int(expected[at])} of sequence {int(row[at])} the slot {int(placed[at])}",
                "take the slot from the sequence's own block: block * block_size + position % block_size",
            )
    used, order = slots[own].sort()
    if (at := _first(used[1:] == used[:-1])) is not None:
        tokens = own.nonzero().flatten()[order[at : at + 2]].tolist()
        raise BatchError(
            f"slot_mapping has {int(used[at])} twice, for the tokens {min(tokens)} and {max(tokens)} of the batch",
            "give each new token another slot: sequences may share only blocks that are already filled",
        )


def _first(wrong: Tensor) -> int | None:
    """Return the first index at which ``wrong`` is True."""
    return int(wrong.int().argmax()) if bool(wrong.any()) else None
