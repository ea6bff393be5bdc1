"""Buckets: the batch sizes that graphs are captured for."""

from __future__ import annotations

from bisect import bisect_left

import torch

from hal.batch import Batch
from hal.config import CompilationConfig
from hal.errors import BatchError, ConfigError
from hal.kv_cache import DUMMY_BLOCK

DEFAULT_SIZES = (1, 2, 4, 8, 16, 32)


def capture_sizes(config: CompilationConfig) -> list[int]:
    """The decode batch sizes to capture, ascending.

    Raises:
        ConfigError: none is left, so that the graphs that the config asks for would never run.
    """
    asked = DEFAULT_SIZES if config.capture_sizes is None else config.capture_sizes
    sizes = [size for size in sorted(set(asked)) if size <= (config.max_capture_size or size)]
    if not sizes:
        raise ConfigError(
            f"capture_sizes {list(asked)} and max_capture_size {config.max_capture_size} leave nothing to capture",
            'change them, or use the compiler "eager"',
        )
    return sizes


def bucket_for(size: int, sizes: list[int]) -> int | None:
    """The smallest of ``sizes`` (ascending) that holds ``size``, or None."""
    place = bisect_left(sizes, size)
    return sizes[place] if place < len(sizes) else None


class PaddedBatch:
    """A decode batch of a fixed size on fixed memory, which real batches are copied into.

    Padding rows have length 0 and write to slots of the dummy block.

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
        self.batch = Batch(
            token_ids=torch.zeros(size, dtype=torch.int64, device=device),
            positions=torch.zeros(size, dtype=torch.int64, device=device),
            slot_mapping=self._dummies.clone(),
            block_table=torch.zeros(size, max_blocks, dtype=torch.int32, device=device),
            query_start_loc=starts.to(device),
            kv_lens=torch.zeros(size, dtype=torch.int32, device=device),
            logits_indices=torch.arange(size, device=device),
            query_start_loc_host=starts,
            kv_lens_host=torch.zeros(size, dtype=torch.int32),
        )

    def host_values(self, batch: Batch) -> dict[str, torch.Tensor]:
        """The host values of this size that stand for ``batch``, by the names that attention takes them by."""
        lens = torch.zeros(self.batch.num_sequences, dtype=torch.int32)
        lens[: batch.num_sequences] = batch.kv_lens_host
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
