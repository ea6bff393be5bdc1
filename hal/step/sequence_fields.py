"""Batch fields of which only some sequences have values of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hal.step.batch import Batch
from hal.step.fields import fields_of
from hal.step.host_copies import to_device
from hal.step.padding import padding_batch


def joined_fields(
    batch_type: type[Batch],
    parts: Sequence[Mapping[str, Tensor]],
    counts: Sequence[int],
    cached: Sequence[int],
    *,
    block_size: int,
    device: torch.device,
) -> dict[str, Tensor]:
    """Return fields along the tokens of a batch, from those of its sequences.

    Args:
        batch_type: the class of the batch.
        parts: for each sequence, the fields of its new tokens by name, on the host or the device. A field that a
            sequence lacks has its default there.
        counts: the number of new tokens of each sequence.
        cached: the number of tokens before them.
        block_size: tokens per block.
        device: the device of the batch.
    """
    names = dict.fromkeys(name for part in parts for name in part)
    bases: dict[torch.device, Batch] = {}
    found = {}
    for name in names:
        declared = fields_of(batch_type)[name]
        place, dim = next(part[name].device for part in parts if name in part), declared.dim("tokens")
        assert declared.default is not None
        assert dim is not None
        if all(name in part for part in parts):
            whole = torch.cat([part[name] for part in parts], dim)
        else:
            if place not in bases:
                bases[place] = padding_batch(Batch, counts, block_size=block_size, device=place, cached=cached)
            whole, start = declared.default(bases[place]).to(declared.dtype).clone(), 0
            for part, count in zip(parts, counts, strict=True):
                if name in part:
                    whole.narrow(dim, start, count).copy_(part[name])
                start += count
        found[name] = whole if whole.device == device else to_device(whole, device)
    return found
