"""Checks of the slots and sequences that kernels of recurrent layers take."""

from __future__ import annotations

import torch
from torch import Tensor


def slots(read_slots: Tensor, write_slots: Tensor | None) -> tuple[Tensor, Tensor, int]:
    """Return the slots to read and to write, contiguous, and the number of slots that a sequence writes."""
    read = read_slots.contiguous()
    return (read, read, 1) if write_slots is None else (read, write_slots.contiguous(), write_slots.shape[-1])


def same_sequences(read_slots: Tensor, written: Tensor, saves: int, query_start_loc: Tensor) -> bool:
    """Return whether the slots and starts are int32, and of the same sequences."""
    sequences = read_slots.shape[0]
    fits = read_slots.dim() == 1 and written.numel() == sequences * saves and query_start_loc.shape == (sequences + 1,)
    return fits and all(each.dtype is torch.int32 for each in (read_slots, written, query_start_loc))
