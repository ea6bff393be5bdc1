"""Batches of an engine's sequences, whose tokens, blocks and lengths persist between steps, in rows.

:meth:`hal.step.Batch.build` reads every block of every sequence in each step. An :class:`InputBatch` checks tokens and
blocks when they arrive, and a step reads what is new.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from hal.device.device import Device, to_device
from hal.errors import BatchError
from hal.ops.lora import NO_ADAPTER
from hal.step.batch import Batch
from hal.step.batch_inputs import Bounds, check_size, int64_of, integers_of, length_of, rows_of
from hal.step.block_table import MORE, BlockTable
from hal.step.fields import DUMMY_SLOT, fields_of
from hal.step.model_batches import SlotBatch, adapter_batch, rollback_batch
from hal.step.new_tokens import PENDING, NewTokens, PendingTokens
from hal.step.staging import Staging

ADAPTERS = "adapter_slots"
_COLUMNS = 8
"""Block tables have a multiple of so many columns, so that few sizes occur."""


class InputBatch:
    """The sequences of an engine, and the batches of their steps; :meth:`hal.Runner.input_batch` makes one.

    Sequences are in rows, numbered from 0 without gaps. A row has tokens, of which the first ``cached`` are in the
    cache, and blocks. Everything is checked when it arrives. All fields of a batch reach the device in one copy, from
    pinned memory. Threading: one thread at a time.

    Args:
        batch_type: the class of the batches.
        max_sequences: the most rows.
        max_length: the most tokens of a row.
        block_size: tokens per block.
        device: the device of the batches and of pending tokens.
        bounds: the ranges of token ids and blocks.
        windows: for each cache group with a block table, the number of most recent tokens of a sequence that its layers
            read; None for all. An engine may use blocks before the window for others, or again for the row, and pass
            the dummy block for them.
        max_pending: the most pending tokens of a row; see :meth:`extend_pending`.

    Attributes:
        slotted: whether the model keeps states per sequence.
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
        windows: Sequence[int | None] = (None,),
        max_pending: int = 1,
    ) -> None:
        sizes = {"max_sequences": max_sequences, "max_length": max_length, "block_size": block_size}
        sizes["max_pending"] = max_pending
        for name, size in [*sizes.items(), *(("window", each) for each in windows if each is not None)]:
            check_size(name, size)
        self.max_sequences, self.max_length, self._block_size = max_sequences, max_length, block_size
        self._type, self._bounds, self.slotted = batch_type, bounds, issubclass(batch_type, SlotBatch)
        slotted = SlotBatch if batch_type.saves == 1 else rollback_batch(SlotBatch, batch_type.saves)
        staged: Any = batch_type if batch_type.groups is not None else slotted if self.slotted else Batch
        self._takes_adapters = ADAPTERS in fields_of(batch_type)
        if self._takes_adapters and batch_type.groups is None:
            staged = adapter_batch(staged, required=True)
        self._staged: type[Batch] = staged
        self._number_of_fields = len(fields_of(batch_type))
        self._staging = Staging(self._staged, device)
        self._columns = -(-max_length // block_size)
        self._tokens = np.zeros((max_sequences, max_length), dtype=np.int64)  # The system maps pages on first use.
        self._tables = [BlockTable(max_sequences, self._columns, block_size, bounds, each) for each in windows]
        self._slot_fields = [name for name in fields_of(self._staged) if name.startswith("slots")]
        self._slots = np.zeros((len(self._slot_fields), max_sequences), np.int64)
        self._saving = np.zeros((max_sequences, batch_type.saves), np.int64)
        self._lengths, self._cached, self._pending = np.zeros((3, max_sequences), np.int64)
        self._adapters = np.full(max_sequences, NO_ADAPTER)
        self._size = 0
        self._numbers = np.arange(max_sequences)
        self._ones = np.ones(max_sequences, np.int64)
        self._sampled = PendingTokens(max_sequences, max_pending, device)

    def __len__(self) -> int:
        return self._size

    def add(
        self,
        token_ids: Sequence[int],
        block_ids: Sequence[int] = (),
        *,
        cached: int = 0,
        slot: int | None = None,
        spare_slots: Sequence[int] = (),
        adapter: int = NO_ADAPTER,
    ) -> int:
        """Add a sequence as the last row, and return its row.

        Args:
            token_ids: all its tokens so far, at least one.
            block_ids: its blocks, in order.
            cached: how many of its tokens are in the cache.
            slot: the slot of its states; required if and only if the model keeps states per sequence.
            spare_slots: further slots for the states that a step keeps beside the last, one fewer than ``saves`` of the
                batch class.
            adapter: the slot of its adapter; -1 for none.

        Raises:
            BatchError: there are no tokens, all rows are taken, the model takes no adapters, or as :meth:`extend`.
        """
        if not length_of("token_ids", token_ids):
            raise BatchError("a sequence has no tokens", "add it with at least one token")
        row = self._size
        if row == self.max_sequences:
            raise BatchError(f"all {row} rows are taken", "remove a sequence first, or raise max_sequences")
        if (slot is not None) != self.slotted:
            raise BatchError(
                f"slot is {slot}, and the model keeps {'states' if self.slotted else 'no state'} per sequence",
                "pass a slot of runner.slots if and only if runner.slots.needed",
            )
        own = [] if slot is None else [*spare_slots, slot]
        if slot is not None and len(own) != self._type.saves:
            raise BatchError(
                f"a sequence gets {len(own)} slots, and a step keeps {self._type.saves} states of it",
                "pass one slot, and as many spare_slots as drafted tokens",
            )
        for each in own:
            check_size("slot", each, DUMMY_SLOT + 1)
        self._check_adapter(adapter)
        self._clear(row)
        self._size += 1
        try:
            self.extend(row, token_ids)
            self.set_cached(row, cached)
            self.extend(row, (), block_ids)
        except BaseException:
            self._size -= 1
            raise
        if slot is not None:
            self._slots[:, row], self._saving[row] = slot, own
        self._adapters[row] = adapter
        return row

    def slot_after(self, row: int, length: int) -> int:
        """Return the slot of a sequence's states after its first ``length`` tokens, which the last step kept.

        Raises:
            BatchError: there is no such row, or the states are not kept.
        """
        self._check_row(row)
        column = self._type.saves - 1 - (int(self._cached[row]) - length)
        if not self.slotted or not 0 <= column < self._type.saves:
            raise BatchError(
                f"the states of row {row} after {length} tokens are not kept",
                "drop at most as many tokens as the row has spare slots, and those of the last step only",
            )
        return int(self._saving[row, column])

    def set_slots(self, row: int, slots: Sequence[int]) -> None:
        """Set the slot of a sequence's states in each cache group that has slots.

        Raises:
            BatchError: there is no such row, or another number of slots.
        """
        self._check_row(row)
        if len(slots) != len(self._slots):
            raise BatchError(f"row {row} gets {len(slots)} slots, not {len(self._slots)}", "pass one for each group")
        self._slots[:, row] = slots

    def set_adapter(self, row: int, adapter: int) -> None:
        """Set the slot of a sequence's adapter for the next steps; -1 for none.

        Raises:
            BatchError: there is no such row, or the model takes no adapters.
        """
        self._check_row(row)
        self._check_adapter(adapter)
        self._adapters[row] = adapter

    def extend(self, row: int, token_ids: Sequence[int] = (), block_ids: Sequence[int] = (), *, group: int = 0) -> None:
        """Append tokens and blocks to a sequence.

        The blocks are for the cache group with the number ``group`` among those with a block table.

        Raises:
            BatchError: there is no such row; a token or block is out of range; the row has the block already; or there
                are more tokens or blocks than ``max_length`` allows, or a pending token. The row is unchanged then.
        """
        self._check_row(row)
        start, added = self._lengths.item(row), length_of("token_ids", token_ids)
        if (end := start + added) > self.max_length:
            raise BatchError(f"row {row} would have {end} tokens; a row takes {self.max_length}", MORE)
        if added:
            if self._pending[row]:
                raise BatchError(f"row {row} has a pending token", "replace it with extend_each first")
            tokens = integers_of(row, "token id {}", token_ids, 0, self._bounds.vocab_size)
        self._tables[group].append(row, block_ids, self._cached.item(row))
        if added:
            self._tokens[row, start:end], self._lengths[row] = tokens, end

    def extend_each(self, rows: Sequence[int], token_ids: Sequence[int]) -> None:
        """Append one token to each of some rows, such as the tokens of a step. It takes the place of pending ones.

        Args:
            rows: the rows, each once.
            token_ids: the token of each.

        Raises:
            BatchError: there is no such row, or it occurs twice or is full; or a token is out of range. The rows are
                unchanged then.
        """
        index = rows_of(rows, self._size)
        tokens = integers_of(rows, "token id {}", token_ids, 0, self._bounds.vocab_size)
        if len(tokens) != len(rows):
            raise BatchError(f"{len(rows)} rows get {len(tokens)} tokens", "pass one token for each row")
        ends = self._lengths[index] - self._pending[index]
        if max(ends.tolist(), default=0) >= self.max_length:
            raise BatchError(
                f"row {rows[int(ends.argmax())]} has {self.max_length} tokens, the most",
                "end the sequence, or make the input batch with a larger max_length",
            )
        self._tokens[self._numbers[index], ends], self._lengths[index], self._pending[index] = tokens, ends + 1, 0

    def extend_pending(self, rows: Sequence[int], tokens: Tensor) -> None:
        """Append a sampled token to each of some rows, which only the device knows: the next batch copies it there.

        :meth:`extend_each` replaces it when the host knows it. It does not wait for the device.

        Args:
            rows: the rows, each once.
            tokens: ``[len(rows)]``, integers, on the device.

        Raises:
            BatchError: there is no such row, or it occurs twice, is full, or has ``max_pending`` pending tokens; or
                there are more or fewer tokens. The rows are unchanged then.
        """
        index = rows_of(rows, self._size)
        self._sampled.check(tokens, len(rows))
        ends, pending = self._lengths[index], self._pending[index]
        full = pending >= self._sampled.most
        if np.count_nonzero(full) or max(ends.tolist(), default=0) >= self.max_length:
            at = int((full | (ends >= self.max_length)).argmax())
            most = "a pending token" if self._sampled.most == 1 else f"{self._sampled.most} pending tokens"
            raise BatchError(
                f"row {rows[at]} has {most if full[at] else f'{self.max_length} tokens, the most'}",
                "replace pending tokens with extend_each first, or end the sequence",
            )
        self._sampled.put(index, pending, tokens)
        self._tokens[self._numbers[index], ends], self._lengths[index] = PENDING, ends + 1
        self._pending[index] = pending + 1

    def extend_drafts(self, rows: Sequence[int], counts: Sequence[int], tokens: Sequence[list[int]] | Tensor) -> None:
        """Append drafted tokens to each of some rows, which :meth:`accept` replaces.

        Args:
            rows: the rows, each once.
            counts: the number of tokens of each.
            tokens: a list for each row; or ``[len(rows), most]``, integers, on the device, whose first tokens count.

        Raises:
            BatchError: as :meth:`extend` and :meth:`extend_pending`.
        """
        if isinstance(tokens, Tensor):
            for place in range(max(counts, default=0)):
                own = [index for index, count in enumerate(counts) if count > place]
                column = tokens[:, place]
                if len(own) < len(counts):
                    column = column[to_device(own, column.device)]
                self.extend_pending([rows[index] for index in own], column)
        else:
            for row, own in zip(rows, tokens, strict=True):
                if own:
                    self.extend(row, own)

    def accept(self, row: int, start: int, token_ids: Sequence[int]) -> None:
        """Replace the tokens from ``start`` on, drafted ones, by those that a step chose: all but the last have run.

        Raises:
            BatchError: there is no such row, a token is out of range, or as :meth:`truncate`.
        """
        self._check_row(row)
        tokens, end = integers_of(row, "token id {}", token_ids, 0, self._bounds.vocab_size), start + len(token_ids)
        self.truncate(row, end - 1)
        self._tokens[row, start:end], self._lengths[row], self._pending[row] = tokens, end, 0

    def set_cached(self, row: int, cached: int) -> None:
        """Set how many of a sequence's first tokens are in the cache, such as after a step.

        Raises:
            BatchError: there is no such row, or it has fewer tokens.
        """
        self._check_row(row)
        if type(cached) is not int or not 0 <= cached <= self._lengths[row]:
            raise BatchError(
                f"row {row} has {self._lengths[row]} tokens, and {cached!r:.70} are said to be cached",
                "pass the number of the sequence's tokens in the cache",
            )
        self._cached[row] = cached

    def set_blocks(self, row: int, block_ids: Sequence[int]) -> None:
        """Replace all blocks of a sequence, such as one that is resumed; see :meth:`extend`."""
        self._check_row(row)
        self._tables[0].replace(row, block_ids, self._cached.item(row))

    def truncate(self, row: int, length: int) -> None:
        """Drop the tokens from ``length`` on, such as drafted ones that were rejected. The blocks stay.

        Where a step keeps several states of a sequence, those after ``length`` tokens become its states. Otherwise
        they stay those of the dropped tokens.

        Raises:
            BatchError: there is no such row, ``length`` is not 1 to its length, or the states are not kept.
        """
        self._check_row(row)
        if type(length) is not int or not 1 <= length <= self._lengths[row]:
            raise BatchError(
                f"row {row} has {self._lengths[row]} tokens, not {length!r:.70} as the length says",
                "pass a length that it has",
            )
        self._pending[row] = max(0, int(self._pending[row] - (self._lengths[row] - length)))
        if self._type.saves > 1 and length < self._cached[row]:
            slot, saving = self.slot_after(row, length), self._saving[row]
            saving[saving == slot], saving[-1] = saving[-1], slot
            self._slots[:, row] = slot
        self._lengths[row], self._cached[row] = length, min(int(self._cached[row]), length)

    def remove(self, row: int) -> int | None:
        """Remove a sequence. The last row takes its place; return that row's old number, or None if it was the last.

        Raises:
            BatchError: there is no such row.
        """
        self._check_row(row)
        self._size -= 1
        if row == self._size:
            return None
        self._move([self._size], [row])
        return self._size

    def reorder(self, rows: Sequence[int]) -> None:
        """Put the rows into another order.

        Args:
            rows: for each row, the present row that comes there: a permutation.

        Raises:
            BatchError: ``rows`` is no permutation of the rows.
        """
        if sorted(int64_of("rows", rows).tolist()) != list(range(self._size)):
            raise BatchError(f"{rows!s:.70} is no permutation of {self._size} rows", "name each row once")
        self._move(list(rows), list(range(self._size)))

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
        index = slice(self._size) if rows is None else rows_of(rows, self._size)
        numbers = self._numbers[index]
        before, counts = self._checked_step(index, num_tokens, cached)
        new = NewTokens.of(before, counts)
        of_token, longest = numbers[new.sequences], max(new.ends.tolist())
        columns = min(-(-longest // (_COLUMNS * self._block_size)) * _COLUMNS, self._columns)
        layout = self._staging.layout({"tokens": len(of_token), "sequences": len(numbers), "blocks": columns})
        layout.host["token_ids"][:] = tokens = self._tokens[of_token, new.positions]
        tables = []
        for each in self._tables:
            tables.append(each.read(index, numbers, before, longest, columns))
        new.write(layout.host, tables, self._block_size)
        for name, of_group in zip(self._slot_fields, self._slots, strict=True):
            layout.host[name][:] = of_group[index]
        if self._type.saves > 1:
            layout.host["write_slots"][:] = self._saving[index]
        if ADAPTERS in layout.host:
            layout.host[ADAPTERS][:] = self._adapters[of_token]
        self._staging.send(layout)
        if np.count_nonzero(self._pending[index]):
            places = new.positions - (self._lengths - self._pending)[of_token]
            self._sampled.insert(layout.tensors["token_ids"], tokens == PENDING, of_token, places)
        if not fields and len(layout.tensors) == self._number_of_fields:
            made = self._type(**layout.tensors)
        else:
            of_batch = fields_of(Batch)
            base = {name: layout.tensors[name] for name in of_batch}
            further = {name: each for name, each in layout.tensors.items() if name not in of_batch}
            made = self._type.extending(Batch(**base), fields | further)
        if cached is not None:
            self._cached[index] = before
        return made

    def advance(self, num_tokens: Sequence[int] | None = None, *, rows: Sequence[int] | None = None) -> None:
        """Count the new tokens of a step as cached. The arguments are those of :meth:`batch`.

        Raises:
            BatchError: as :meth:`batch`.
        """
        index = slice(self._size) if rows is None else rows_of(rows, self._size)
        before, counts = self._checked_step(index, num_tokens, None)
        self._cached[index] = before + counts

    def _checked_step(self, index: Any, num_tokens: Sequence[int] | None, cached: Sequence[int] | None) -> Any:
        """Return the numbers of cached and of new tokens of each row in a step."""
        size = len(self._lengths[index])
        before = self._cached[index] if cached is None else int64_of("cached", cached)
        counts = self._ones[:size] if num_tokens is None else int64_of("num_tokens", num_tokens)
        if not size or not size == len(before) == len(counts):
            raise BatchError(
                f"a batch has {size} rows, {len(counts)} numbers of tokens and {len(before)} of cached ones",
                "pass one of each per sequence, and at least one sequence",
            )
        ends = before + counts
        room = self._lengths[index]
        for table in self._tables:
            room = np.minimum(room, table.counts[index] * self._block_size)
        wrong = ends > room
        if num_tokens is not None or cached is not None:
            # A sum beyond int64 is negative, and so not above the cached number.
            wrong |= (before < 0) | (ends <= before)
        if np.count_nonzero(wrong):
            at = int(wrong.argmax())
            self._refuse(int(self._numbers[index][at]), int(before[at]), int(counts[at]))
        return before, counts

    def _refuse(self, row: int, cached: int, count: int) -> None:
        if count < 1:
            raise BatchError(f"row {row} has no new token", "leave it out, or pass at least one token")
        end, length = cached + count, int(self._lengths[row])
        blocks = int(min(each.counts[row] for each in self._tables))
        if cached < 0 or end > length:
            raise BatchError(
                f"row {row} has {length} tokens, {cached} of them cached, and {count} are to run",
                "extend it with its new tokens before the step",
            )
        raise BatchError(
            f"row {row} would have {end} tokens in the cache, but its {blocks} blocks hold {blocks * self._block_size}",
            "allocate more blocks for it before the step",
        )

    def _move(self, sources: list[int], targets: list[int]) -> None:
        width = int(self._lengths[sources].max())
        for array in (self._lengths, self._cached, self._pending, self._saving, self._adapters, *self._slots):
            array[targets] = array[sources]
        self._tokens[targets, :width] = self._tokens[sources, :width]
        for each in self._tables:
            each.move(sources, targets)
        if self._pending[targets].any():
            self._sampled.move(sources, targets)

    def _clear(self, row: int) -> None:
        for table in self._tables:
            table.clear(row)
        self._lengths[row] = self._cached[row] = self._pending[row] = 0

    def _check_adapter(self, adapter: int) -> None:
        if adapter != NO_ADAPTER and not self._takes_adapters:
            raise BatchError(f"adapter is {adapter}, and the model takes no adapters", "set adapters.slots")

    def _check_row(self, row: int) -> None:
        if not (type(row) is int and 0 <= row < self._size):
            raise BatchError(f"there is no row {row!r:.70} among {self._size}", "use the rows that add() returned")
