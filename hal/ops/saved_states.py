"""The slots of states per sequence that a step reads and writes.

An operation reads a sequence's state from one slot, and writes the states after its last tokens to others. Reading and
writing one slot is the usual step. A step that writes a slot for each of several tokens can be rolled back by a choice
of slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hal.ops.declaration.constraints import Draw

SLOTS = 12
"""Slots of the samples, enough for different ones of all reads and writes."""


def slots_of_steps(
    draw: Draw, lengths: Sequence[int], saves: int = 0, *, apart: bool = True
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Return slots to read and to write, and ``query_start_loc`` with its host twin, for samples.

    Args:
        draw: the source of the slots.
        lengths: the number of tokens of each sequence.
        saves: columns of ``write_slots``; 0 for None.
        apart: whether all slots differ; else the last one of a sequence is the one that it reads.
    """
    slots = 1 + draw.permutation(SLOTS - 1)
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    write = slots[: len(lengths) * saves].view(len(lengths), saves).clone() if saves else None
    read = slots[-len(lengths) :].clone()
    if write is not None and not apart:
        write[:, -1] = read
    return read, write, starts.to(draw.device), starts


def last_tokens(query_start_loc: Tensor, saves: int) -> tuple[Tensor, Tensor]:
    """Return the last ``saves`` tokens of each sequence, ``[sequences, saves]``, and which of them it has."""
    starts = query_start_loc.long()
    token = starts[1:, None] + torch.arange(-saves, 0, device=starts.device)
    return token, token >= starts[:-1, None]


def written_slots(read_slots: Tensor, write_slots: Tensor | None) -> Tensor:
    """Return the slots to write, ``[sequences, saves]``."""
    return read_slots.unsqueeze(-1) if write_slots is None else write_slots


def write_states(state: Tensor, write_slots: Tensor, values: Tensor, kept: Tensor) -> None:
    """Write values ``[sequences, saves, ...]`` into their slots where ``kept``, ``[sequences, saves]``, says so."""
    slots = write_slots.long()
    kept = kept.view(*kept.shape, *[1] * (state.dim() - 1))
    state[slots] = torch.where(kept, values.to(state.dtype), state[slots])
