"""Buckets: the batch sizes that graphs are captured for."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from copy import copy
from typing import Self

import attrs
import torch
from torch.nn.functional import pad

from hal.batch import Batch
from hal.config import CompilationConfig
from hal.errors import BatchError, ConfigError
from hal.kv_cache import DUMMY_BLOCK

LARGEST = 1 << 16
"""Sequences, or tokens, that a graph may be captured for: beyond what any device has memory for."""


def capture_sizes(config: CompilationConfig, defaults: Sequence[int], most: int | None = None) -> list[int]:
    """The decode batch sizes to capture, ascending.

    Args:
        config: what it names is captured.
        defaults: the backend's, for a config that names none.
        most: sequences that the cache can hold; larger ones of the defaults, but for the next larger, are left out.

    Raises:
        ConfigError: none is left, so that the graphs that the config asks for would never run.
    """
    asked: Sequence[int] = defaults if config.capture_sizes is None else config.capture_sizes
    if config.capture_sizes is None and most is not None:
        reached = bucket_for(most, sorted(defaults))
        asked = [size for size in defaults if reached is None or size <= reached]
    sizes = [size for size in sorted(set(asked)) if size <= (config.max_capture_size or size)]
    if not sizes:
        raise ConfigError(
            f"capture_sizes {list(asked)} and max_capture_size {config.max_capture_size} leave nothing to capture",
            'change them, or use the compiler "eager"',
        )
    if sizes[-1] > LARGEST:
        raise ConfigError(
            f"capture_sizes has {sizes[-1]}, and no graph is captured for more than {LARGEST}",
            "leave it out; larger batches run eagerly",
        )
    return sizes


def fitted_to(config: CompilationConfig, sequences: int, defaults: Sequence[int]) -> CompilationConfig:
    """Without the default decode batch sizes that so few sequences cannot fill; as it is if it names some itself.

    Args:
        config: what is configured.
        sequences: that will run, at most.
        defaults: the backend's sizes.
    """
    decode = config.of("decode")
    if decode.capture_sizes is not None or decode.max_capture_size is not None:
        return config
    return attrs.evolve(config, max_capture_size=bucket_for(sequences, sorted(defaults)))


def bucket_for(size: int, sizes: list[int]) -> int | None:
    """The smallest of ``sizes`` (ascending) that holds ``size``, or None."""
    place = bisect_left(sizes, size)
    return sizes[place] if place < len(sizes) else None


class PaddedBatch:
    """A decode batch of a fixed size on fixed memory, which real batches are copied into.

    Padding rows have length 0 and write to slots of the dummy block. All rows begin as such, but for the first, which
    has length 1: there are kernels that refuse to be launched, or captured, with no length above 0.

    Args:
        size: sequences.
        max_blocks: columns of the block table.
        block_size: tokens per block.
        device: where the tensors for the model live.
    """

    def __init__(self, size: int, max_blocks: int, block_size: int, device: torch.device) -> None:
        starts = torch.arange(size + 1, dtype=torch.int32)
        dummies = DUMMY_BLOCK * block_size + torch.arange(size, dtype=torch.int32) % block_size
        self._dummies = dummies.to(device)
        lens = (torch.arange(size) == 0).to(torch.int32)
        self.batch = Batch(
            token_ids=torch.zeros(size, dtype=torch.int64, device=device),
            positions=torch.zeros(size, dtype=torch.int64, device=device),
            slot_mapping=self._dummies.clone(),
            block_table=torch.zeros(size, max_blocks, dtype=torch.int32, device=device),
            query_start_loc=starts.to(device),
            kv_lens=lens.to(device, copy=True),
            logits_indices=torch.arange(size, device=device),
            query_start_loc_host=starts,
            kv_lens_host=lens,
        )

    def first(self, size: int) -> Self:
        """A smaller one, on the memory of this one's first rows."""
        rows = {name: tensor[:size] for name, tensor in attrs.asdict(self.batch, recurse=False).items()}
        starts = {name: getattr(self.batch, name)[: size + 1] for name in ("query_start_loc", "query_start_loc_host")}
        smaller = copy(self)
        smaller._dummies = self._dummies[:size]
        smaller.batch = Batch(**(rows | starts))
        return smaller

    def host_values(self, batch: Batch) -> dict[str, torch.Tensor]:
        """The host values of this size that stand for ``batch``, by the names that attention takes them by."""
        lens, padding = batch.kv_lens_host, self.batch.num_sequences - batch.num_sequences
        if padding:
            lens = pad(lens, (0, padding))
        return {"query_start_loc_host": self.batch.query_start_loc_host, "kv_lens_host": lens}

    def fill(self, batch: Batch) -> None:
        """Copy ``batch`` in, and reset the rows after it to padding.

        Raises:
            BatchError: the block table is wider than the fixed one.
        """
        rows, fixed = batch.num_sequences, self.batch
        columns, most = batch.block_table.shape[1], fixed.block_table.shape[1]
        if columns > most:
            raise BatchError(
                f"a block table of {columns} columns; the graphs were captured for {most}",
                "give each sequence at most as many blocks as its longest length takes",
            )
        fixed.token_ids[:rows] = batch.token_ids
        fixed.positions[:rows] = batch.positions
        fixed.slot_mapping[:rows] = batch.slot_mapping
        fixed.block_table[:rows, :columns] = batch.block_table
        fixed.kv_lens[:rows] = batch.kv_lens
        fixed.logits_indices[:rows] = batch.logits_indices
        if rows < fixed.num_sequences:
            fixed.token_ids[rows:] = 0
            fixed.positions[rows:] = 0
            fixed.slot_mapping[rows:] = self._dummies[rows:]
            fixed.kv_lens[rows:] = 0
