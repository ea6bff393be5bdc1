"""The new tokens of a step: where each is in its sequence and in the cache, as arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from hal.step.fields import suffixed


@attrs.frozen(eq=False)
class NewTokens:
    """The places of a step's new tokens, in the order of the batch. All arrays are int64.

    Attributes:
        sequences: ``[tokens]``: the sequence of each token.
        positions: ``[tokens]``: its position in the sequence.
        starts: ``[sequences + 1]``: the first token of each sequence, then the number of tokens.
        ends: ``[sequences]``: the length of each sequence, including new tokens.
    """

    sequences: NDArray[np.int64]
    positions: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]

    @classmethod
    def of(cls, cached: NDArray[np.int64], counts: NDArray[np.int64]) -> NewTokens:
        """Return the places of ``counts[i]`` tokens of each sequence, at least one, after its ``cached[i]`` tokens."""
        numbers, total = np.arange(len(counts) + 1), int(counts.sum())
        if total == len(counts):
            return cls(numbers[:-1], cached, numbers, cached + counts)
        starts = np.concatenate(([0], counts.cumsum()))
        sequences = numbers[:-1].repeat(counts)
        positions = np.arange(total) + (cached - starts[:-1]).repeat(counts)
        return cls(sequences, positions, starts, cached + counts)

    def write(self, host: Mapping[str, Any], tables: Sequence[NDArray[np.int32]], block_size: int) -> None:
        """Write the fields that do not depend on the values of tokens.

        Args:
            host: an array for each field, by name.
            tables: for each cache group, ``[sequences, columns]``: the blocks of each sequence.
            block_size: tokens per block.
        """
        block, offset = np.divmod(self.positions, block_size)
        host["positions"][:] = self.positions
        for group, table in enumerate(tables):
            host[suffixed("slot_mapping", group)][:] = table[self.sequences, block] * block_size + offset
            host[suffixed("block_table", group)][:] = table
        host["query_start_loc"][:] = self.starts
        host["kv_lens"][:] = self.ends
