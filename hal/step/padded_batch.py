"""Batches of real tensors, extended by sequences of padding, so that several ranks run steps of the same shape."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from hal.step.batch import Batch
from hal.step.dummies import DUMMY_BLOCK
from hal.step.fields import Field, Padding, fields_of


def padding_batch(
    batch_type: type[Batch],
    lengths: Sequence[int],
    *,
    block_size: int,
    device: torch.device,
    cached: Sequence[int] | None = None,
) -> Batch:
    """Return a batch of padding only: sequences of token 0, which write to the dummy block.

    Unlike the padding rows of a :class:`hal.step.StaticBatch`, they have their length, so that any kernel runs them.

    Args:
        batch_type: the class of the batch.
        lengths: the number of new tokens of each sequence, 1 or more.
        block_size: tokens per block of the cache.
        device: the device of all fields except host twins.
        cached: the number of tokens before the new ones of each sequence; None for 0.
    """
    starts = [0] * len(lengths) if cached is None else cached
    kv_lens = [start + length for start, length in zip(starts, lengths, strict=True)]
    ends = torch.tensor(lengths).cumsum(0)
    tokens = int(ends[-1])
    positions = torch.cat([torch.arange(*each) for each in zip(starts, kv_lens, strict=True)])
    sizes = {"tokens": tokens, "sequences": len(lengths), "blocks": -(-max(kv_lens) // block_size)}
    own = {
        "positions": positions,
        "slot_mapping": (DUMMY_BLOCK * block_size + positions % block_size).to(torch.int32),
        "block_table": torch.full((len(lengths), sizes["blocks"]), DUMMY_BLOCK, dtype=torch.int32),
        "query_start_loc": functional.pad(ends, (1, 0)).to(torch.int32),
        "kv_lens": torch.tensor(kv_lens, dtype=torch.int32),
    }
    padding = Padding(sizes, lengths[0] if len(set(lengths)) == 1 else 0, block_size)
    made = {}
    for name, declared in fields_of(batch_type).items():
        tensor = own.get(declared.twin_of or name)
        tensor = declared.padding(padding) if tensor is None else tensor
        made[name] = tensor if declared.twin_of else tensor.to(device)
    return batch_type(**made)


def extended(batch: Batch, padding: Batch) -> Batch:
    """Return ``batch`` followed by the sequences of ``padding``, a batch of the same class."""
    shifts = {"query_start_loc": batch.num_tokens}
    return type(batch)(
        **{
            name: _joined(
                declared, getattr(batch, name), getattr(padding, name), shifts.get(declared.twin_of or name, 0)
            )
            for name, declared in fields_of(type(batch)).items()
        }
    )


def _joined(declared: Field, first: Tensor, second: Tensor, shift: int) -> Tensor:
    """Concatenate two tensors of a field along its tokens or sequences; ``shift`` is added to the second."""
    width = declared.dim("blocks")
    if width is not None:
        most = max(first.shape[width], second.shape[width])
        first, second = (_widened(each, width, most) for each in (first, second))
    for name in ("tokens", "sequences"):
        if (dim := declared.dim(name)) is not None:
            extra = declared.axes[dim].extra  # the elements before a second tensor's own, such as the first start
            own = second.narrow(dim, extra, second.shape[dim] - extra)
            return torch.cat([first, own + shift if shift else own], dim)
    return first


def _widened(table: Tensor, dim: int, width: int) -> Tensor:
    missing = width - table.shape[dim]
    if not missing:
        return table
    shape = [*table.shape[:dim], missing, *table.shape[dim + 1 :]]
    return torch.cat([table, table.new_full(shape, DUMMY_BLOCK)], dim)
