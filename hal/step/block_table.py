"""The blocks of an engine's sequences, in rows: the block table of one cache group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hal.errors import BatchError
from hal.step.batch_inputs import Bounds, integers_of, length_of
from hal.step.fields import DUMMY_BLOCK

MORE = "end the sequence, or make the input batch with a larger max_length"
"""What to do about a row without room."""


class BlockTable:
    """The blocks of sequences.

    Args:
        rows: the most sequences.
        columns: the most blocks of a sequence.
        block_size: tokens per block.
        bounds: the range of blocks.
        window: the number of most recent tokens of a sequence that the layers read; None for all.

    Attributes:
        counts: ``[rows]``, int64: the blocks of each sequence.
    """

    def __init__(self, rows: int, columns: int, block_size: int, bounds: Bounds, window: int | None) -> None:
        self.counts = np.zeros(rows, np.int64)
        self._table = np.zeros((rows, columns), dtype=np.int32)  # Zero after a row's blocks.
        self._block_size, self._bounds = block_size, bounds
        self._window = columns * block_size if window is None else window

    def append(self, row: int, block_ids: Sequence[int], cached: int) -> None:
        """Append blocks to a row, of which ``cached`` tokens are in the cache.

        Raises:
            BatchError: a block is out of range, or the row has it already. The row is unchanged then.
        """
        first = self.counts.item(row)
        last, columns = first + length_of("block_ids", block_ids), self._table.shape[1]
        if last > columns:
            raise BatchError(f"row {row} would have {last} blocks; a row takes {columns}", MORE)
        unread = max(cached - self._window + 1, 0) // self._block_size
        skipped, end = max(0, unread - first), self._bounds.num_blocks
        unused = integers_of(row, "block {}", block_ids[:skipped], DUMMY_BLOCK, end) if skipped else []
        new = integers_of(row, "block {}", block_ids[skipped:], self._bounds.first_block, end)
        if len(set(new)) < len(new) or not set(new).isdisjoint(self._table[row, unread:first].tolist()):
            raise BatchError(
                f"row {row} would have one of the blocks {new!s:.70} twice; it would overwrite its own tokens",
                "pass each block once per sequence, and only those that are new",
            )
        self._table[row, first:last], self.counts[row] = [*unused, *new], last

    def replace(self, row: int, block_ids: Sequence[int], cached: int) -> None:
        """Replace a row's blocks; see :meth:`append`."""
        before, self.counts[row] = self.counts.item(row), 0
        try:
            self.append(row, block_ids, cached)
        except BaseException:
            self.counts[row] = before
            raise
        self._table[row, len(block_ids) : before] = 0

    def clear(self, row: int) -> None:
        """Remove a row's blocks."""
        self._table[row, : self.counts[row]] = self.counts[row] = 0

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Copy rows to others, in place of what these had."""
        columns = int(max(self.counts[sources].max(), self.counts[targets].max()))
        self._table[targets, :columns] = self._table[sources, :columns]
        self.counts[targets] = self.counts[sources]

    def read(
        self, index: Any, numbers: NDArray[np.int64], cached: NDArray[np.int64], longest: int, columns: int
    ) -> Any:
        """Return the first columns of some rows.

        Args:
            index: the rows, as numpy takes them.
            numbers: the same as numbers.
            cached: the tokens of each in the cache.
            longest: the most tokens of a row.
            columns: the number of columns.
        """
        table = self._table[index, :columns]
        if longest <= self._window:
            return table
        unread = np.maximum(cached - self._window + 1, 0) // self._block_size
        # Kernels may multiply values before the window by 0, and 0 * NaN is NaN. So a row names no block of others.
        return np.where(np.arange(columns) < unread[:, None], self._table[numbers, unread][:, None], table)
