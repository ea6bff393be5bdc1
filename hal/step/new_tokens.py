"""The new tokens of a step: their places in sequences and in the cache, and those that only the device knows yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hal.device.device import Device, to_device
from hal.errors import BatchError
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


PENDING = -1
"""The token id of a pending token on the host."""
_INTEGERS = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}


class PendingTokens:
    """The pending tokens of each row of an :class:`hal.step.InputBatch`, on the device. Nothing waits for the device.

    Args:
        most: the most pending tokens of a row.
    """

    def __init__(self, max_sequences: int, most: int, device: Device) -> None:
        self._tokens = torch.zeros(max_sequences, most, dtype=torch.int64, device=device.torch)
        self._numbers = np.arange(max_sequences)
        self.most = most

    @staticmethod
    def check(tokens: object, count: int) -> None:
        """Raise BatchError unless ``tokens`` is a tensor of ``count`` integers."""
        if not isinstance(tokens, Tensor) or tokens.dtype not in _INTEGERS:
            found = tokens.dtype if isinstance(tokens, Tensor) else repr(tokens)
            raise BatchError(f"tokens is {found!s:.70}, not a tensor of integers", "pass the tokens that were sampled")
        if tokens.shape != (count,):
            raise BatchError(f"{count} rows get tokens {list(tokens.shape)}", "pass one token for each row")

    def put(self, index: Any, places: NDArray[np.int64], tokens: Tensor) -> None:
        """Keep the tokens of some rows.

        Args:
            index: the rows, as a slice or an array.
            places: how many pending tokens each row has before.
            tokens: one for each row.
        """
        if isinstance(index, slice) and not places.any():
            self._tokens[index, 0].copy_(tokens)
        else:
            at = to_device(np.stack((self._numbers[index], places)), self._tokens.device)
            self._tokens[at[0], at[1]] = tokens.to(torch.int64)

    def insert(self, token_ids: Tensor, where: Any, rows: Any, places: Any) -> None:
        """Write the pending tokens of a batch into its token ids.

        Args:
            token_ids: ``[tokens]``, on the device.
            where: whether each token is pending.
            rows: the row of each token.
            places: how many pending tokens of its row precede each pending token.
        """
        with torch.inference_mode():
            if where.all() and not places.any() and np.array_equal(rows, self._numbers[: len(rows)]):
                token_ids.copy_(self._tokens[: len(rows), 0])
                return
            at = to_device(np.stack((where.nonzero()[0], rows[where], places[where])), token_ids.device)
            token_ids[at[0]] = self._tokens[at[1], at[2]]

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Give the tokens of some rows to other rows."""
        device = self._tokens.device
        self._tokens[to_device(targets, device)] = self._tokens[to_device(sources, device)]
