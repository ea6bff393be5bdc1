"""Validation of the tensors of a batch that an engine made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hal.errors import BatchError, nearest
from hal.step.batch_inputs import Bounds
from hal.step.dummies import DUMMY_BLOCK
from hal.step.fields import fields_of


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
