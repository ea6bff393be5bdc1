"""The block and the slot of padding rows, and the values of such rows."""

from __future__ import annotations

import torch
from torch import Tensor

from hal.step.fields import Padding

DUMMY_BLOCK = 0
"""The block that padding rows write to. No sequence may own it."""
DUMMY_SLOT = 0
"""The slot that padding rows write to. No sequence may own it."""


def dummy_slots(padding: Padding) -> Tensor:
    """Return the cache slots of padding tokens."""
    offsets = torch.arange(padding.sizes["tokens"], dtype=torch.int32) % padding.block_size
    return DUMMY_BLOCK * padding.block_size + offsets


def equal_starts(padding: Padding) -> Tensor:
    """Return ``query_start_loc`` of sequences with equally many queries."""
    return torch.arange(padding.sizes["sequences"] + 1, dtype=torch.int32) * padding.queries
