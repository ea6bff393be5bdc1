"""Batches of an engine's sequences, whose rows persist between steps.

:meth:`hal.step.Batch.build` reads every block of every sequence in each step. An :class:`InputBatch` checks tokens and
blocks when they arrive, and a step reads what is new.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hal.device.device import Device
from hal.errors import BatchError
from hal.step.batch import Batch
from hal.step.batch_inputs import Bounds, int64_of
from hal.step.host_copies import to_device
from hal.step.sequence_rows import PENDING, SequenceRows
from hal.step.slot_batch import SlotBatch
from hal.step.staging import Staging

_COLUMNS = 8
"""Block tables have a multiple of so many columns, so that few sizes occur."""


class InputBatch(SequenceRows):
    """The sequences of an engine, and the batches of their steps; :meth:`hal.Runner.input_batch` makes one.

    All fields of a batch reach the device in one copy, from pinned memory. Threading: one thread at a time.

    Args:
        batch_type: the class of the batches.
        max_sequences: the most rows.
        max_length: the most tokens of a row.
        block_size: tokens per block.
        device: the device of the batches.
        bounds: the ranges of token ids and blocks.
        window: the number of most recent tokens of a sequence that the model reads; None for all.
    """

    def __init__(
        self,
        batch_type: type[Batch],
        *,
        max_sequences: int,
        max_length: int,
        block_size: int,
        device: Device,
        bounds: Bounds,
        window: int | None = None,
    ) -> None:
        super().__init__(
            max_sequences=max_sequences,
            max_length=max_length,
            block_size=block_size,
            bounds=bounds,
            slotted=issubclass(batch_type, SlotBatch),
            device=device.torch,
            window=window,
        )
        self._type = batch_type
        self._staging = Staging(SlotBatch if self._slotted else Batch, device)
        self._ones = np.ones(max_sequences, np.int64)

    def batch(
        self,
        num_tokens: Sequence[int] | None = None,
        *,
        rows: Sequence[int] | None = None,
        cached: Sequence[int] | None = None,
        **fields: Any,
    ) -> Any:
        """Make the batch of a step from the tokens of each row that follow those in the cache.

        The batch is valid until the next call, which overwrites its tensors. After the step, call :meth:`set_cached`
        or :meth:`advance`.

        Args:
            num_tokens: the number of new tokens of each sequence; None for one each.
            rows: the rows of the sequences, in the order of the batch; None for all.
            cached: the number of tokens of each sequence in the cache, which is set as by :meth:`set_cached`; None for
                the present one.
            fields: tensors of the further fields of the batch class.

        Raises:
            BatchError: there are no sequences, or there is no such row, or it occurs twice; a row has too few tokens or
                blocks for the step; a number is out of range; or a field is missing or has the wrong shape.
        """
        index = slice(self._size) if rows is None else self._rows_of(rows)
        numbers = self._numbers[index]
        size = len(numbers)
        before = self._cached[index] if cached is None else int64_of("cached", cached)
        counts = self._ones[:size] if num_tokens is None else int64_of("num_tokens", num_tokens)
        ends = self._check_step(index, before, counts)
        starts = self._numbers[: size + 1] if num_tokens is None else np.concatenate(([0], counts.cumsum()))
        total = int(starts[-1])
        if total == size:
            of_token, positions = numbers, before
        else:
            of_token = numbers.repeat(counts)
            positions = np.arange(total) - (starts[:-1] - before).repeat(counts)
        longest = max(ends.tolist())
        columns = min(-(-longest // (_COLUMNS * self._block_size)) * _COLUMNS, self._columns)
        layout = self._staging.layout({"tokens": total, "sequences": size, "blocks": columns})
        host = layout.host
        host["token_ids"][:] = tokens = self._tokens[of_token, positions]
        host["positions"][:] = positions
        block, offset = np.divmod(positions, self._block_size)
        host["slot_mapping"][:] = self._table[of_token, block] * self._block_size + offset
        table = self._table[index, :columns]
        if longest > self._window:
            unread = np.maximum(before - self._window + 1, 0) // self._block_size
            # Kernels may multiply values before the window by 0, and 0 * NaN is NaN. So a row names no block of others.
            table = np.where(np.arange(columns) < unread[:, None], self._table[numbers, unread][:, None], table)
        host["block_table"][:] = table
        host["query_start_loc"][:] = starts
        host["kv_lens"][:] = ends
        if self._slotted:
            host["slots"][:] = self._slots[index]
        self._staging.send(layout)
        if np.count_nonzero(self._pending[index]):
            self._insert_pending(layout.tensors["token_ids"], tokens == PENDING, of_token)
        if self._type in (Batch, SlotBatch) and not fields:
            made = self._type(**layout.tensors)
        else:
            base = {name: each for name, each in layout.tensors.items() if name != "slots"}
            slots = {"slots": layout.tensors["slots"]} if self._slotted else {}
            made = self._type.extending(Batch(**base), fields | slots)
        if cached is not None:
            self._cached[index] = before
        return made

    def advance(self, num_tokens: Sequence[int] | None = None, *, rows: Sequence[int] | None = None) -> None:
        """Count the new tokens of a step as cached. The arguments are those of :meth:`batch`.

        Raises:
            BatchError: as :meth:`batch`.
        """
        index = slice(self._size) if rows is None else self._rows_of(rows)
        cached = self._cached[index]
        counts = self._ones[: len(cached)] if num_tokens is None else int64_of("num_tokens", num_tokens)
        self._cached[index] = self._check_step(index, cached, counts)

    def _check_step(self, index: Any, cached: Any, counts: Any) -> Any:
        """Return the number of tokens of each row in the cache after the step."""
        size = len(self._lengths[index])
        if not size or not size == len(cached) == len(counts):
            raise BatchError(
                f"a batch has {size} rows, {len(counts)} numbers of tokens and {len(cached)} of cached ones",
                "pass one of each per sequence, and at least one sequence",
            )
        ends = cached + counts
        room = np.minimum(self._lengths[index], self._blocks[index] * self._block_size)
        # A sum beyond int64 is negative, and so not above the cached number.
        wrong = (ends > room) | (cached < 0) | (ends <= cached)
        if np.count_nonzero(wrong):
            at = int(wrong.argmax())
            self._refuse(int(self._numbers[index][at]), int(cached[at]), int(counts[at]))
        return ends

    def _refuse(self, row: int, cached: int, count: int) -> None:
        if count < 1:
            raise BatchError(f"row {row} has no new token", "leave it out, or pass at least one token")
        end, length, blocks = cached + count, int(self._lengths[row]), int(self._blocks[row])
        if cached < 0 or end > length:
            raise BatchError(
                f"row {row} has {length} tokens, {cached} of them cached, and {count} are to run",
                "extend it with its new tokens before the step",
            )
        raise BatchError(
            f"row {row} would have {end} tokens in the cache, but its {blocks} blocks hold {blocks * self._block_size}",
            "allocate more blocks for it before the step",
        )

    def _insert_pending(self, token_ids: torch.Tensor, where: Any, of_token: Any) -> None:
        """Copy the sampled tokens that the host does not know yet into a batch, on the device."""
        with torch.inference_mode():
            if where.all() and np.array_equal(of_token, self._numbers[: len(of_token)]):
                token_ids.copy_(self.sampled[: len(of_token)])
                return
            places = to_device(np.stack((where.nonzero()[0], of_token[where])), token_ids.device)
            token_ids[places[0]] = self.sampled[places[1]]
