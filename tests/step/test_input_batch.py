"""Tests of batches whose sequences persist between steps, and of batches from an engine's tensors."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

import hal
from hal.device.host_device import HostDevice
from hal.errors import BatchError
from hal.step import Bounds, InputBatch, SlotBatch, field, fields_of, rollback_batch

BLOCK, VOCABULARY, BLOCKS, LONGEST = 16, 1000, 4000, 400
BOUNDS = Bounds(VOCABULARY, 1, BLOCKS, LONGEST)


def made(batch_type: type[hal.step.Batch] = hal.step.Batch, rows: int = 6, window: int | None = None) -> InputBatch:
    return InputBatch(
        batch_type,
        max_sequences=rows,
        max_length=LONGEST,
        block_size=BLOCK,
        device=HostDevice(),
        bounds=BOUNDS,
        windows=[window],
    )


@attrs.define
class Expected:
    """One sequence, kept as lists."""

    tokens: list[int]
    blocks: list[int]
    cached: int
    slot: int


def built(batch_type: type[hal.step.Batch], sequences: list[Expected], counts: list[int]) -> Any:
    """Return the batch that Batch.build makes of the same sequences."""
    return batch_type.build(
        [each.tokens[each.cached : each.cached + count] for each, count in zip(sequences, counts, strict=True)],
        [each.blocks for each in sequences],
        block_size=BLOCK,
        cached=[each.cached for each in sequences],
        fields={"slots": [each.slot for each in sequences]} if batch_type is SlotBatch else {},
        bounds=BOUNDS,
    )


def check_equal(found: hal.step.Batch, expected: hal.step.Batch) -> None:
    for name, declared in fields_of(type(expected)).items():
        is_, of = getattr(found, name), getattr(expected, name)
        if name == "block_table":  # It may have more columns. Those after a sequence's blocks are not read.
            for row, length in enumerate(expected.kv_lens.tolist()):
                used = -(-length // BLOCK)
                assert torch.equal(is_[row, :used], of[row, :used]), (row, is_, of)
            continue
        assert torch.equal(is_, of), (name, is_, of)
        assert is_.dtype == declared.dtype
    found.check()


@pytest.mark.parametrize("batch_type", [hal.step.Batch, SlotBatch])
@pytest.mark.parametrize("seed", range(4))
def test_random_steps_are_those_of_lists(batch_type: type[hal.step.Batch], seed: int) -> None:
    """Adds, extends, truncates, removes, resumes and reorders at random, and compares the batch of each step."""
    draw = random.Random(seed)
    inputs, sequences, free = made(batch_type), list[Expected](), list(range(1, BLOCKS))
    draw.shuffle(free)

    def blocks_for(length: int, have: int = 0) -> list[int]:
        return [free.pop() for _ in range(max(0, -(-length // BLOCK) - have))]

    steps = 0
    for _ in range(300):
        action = draw.random()
        if len(sequences) < 6 and (action < 0.25 or not sequences):
            tokens = [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 90))]
            one = Expected(tokens, blocks_for(len(tokens)), draw.randrange(len(tokens)), draw.randint(1, 9))
            slot = {"slot": one.slot} if batch_type is SlotBatch else {}
            assert inputs.add(one.tokens, one.blocks, cached=one.cached, **slot) == len(sequences)
            sequences.append(one)
        elif action < 0.32:
            row = draw.randrange(len(sequences))
            moved = inputs.remove(row)
            last = sequences.pop()
            assert moved == (None if row == len(sequences) else len(sequences))
            if moved is not None:
                sequences[row] = last
        elif action < 0.38:
            order = draw.sample(range(len(sequences)), len(sequences))
            inputs.reorder(order)
            sequences = [sequences[each] for each in order]
        elif action < 0.45:
            row = draw.randrange(len(sequences))
            one = sequences[row]
            length = draw.randint(1, len(one.tokens))
            inputs.truncate(row, length)
            del one.tokens[length:]
            one.cached = min(one.cached, length)
        elif action < 0.5:  # resumed after its blocks were taken from it
            row = draw.randrange(len(sequences))
            sequences[row].blocks, sequences[row].cached = blocks_for(len(sequences[row].tokens)), 0
            inputs.set_blocks(row, sequences[row].blocks)
            inputs.set_cached(row, 0)
        else:
            rows = sorted(draw.sample(range(len(sequences)), draw.randint(1, len(sequences))))
            for row in rows:
                one = sequences[row]
                if one.cached == len(one.tokens):
                    if len(one.tokens) > LONGEST - 9:
                        inputs.truncate(row, 5)
                        del one.tokens[5:]
                        one.cached = 5
                    new = [draw.randrange(VOCABULARY) for _ in range(draw.choice((1, 1, 1, 5)))]
                    added = blocks_for(len(one.tokens) + len(new), len(one.blocks))
                    inputs.extend(row, new, added)
                    one.tokens += new
                    one.blocks += added
            stepped = [sequences[row] for row in rows]
            every = draw.random() < 0.5
            counts = [1 if every else draw.randint(1, len(each.tokens) - each.cached) for each in stepped]
            given = {} if rows != list(range(len(sequences))) or draw.random() < 0.5 else {"all": True}
            batch = inputs.batch(None if every else counts, rows=None if given else rows)
            check_equal(batch, built(batch_type, stepped, counts))
            if draw.random() < 0.2:  # an engine that counts what is cached
                inputs.set_cached(rows[0], 0)
                again = inputs.batch(counts, rows=rows, cached=[each.cached for each in stepped])
                check_equal(again, built(batch_type, stepped, counts))
            inputs.advance(None if every else counts, rows=None if given else rows)
            for each, count in zip(stepped, counts, strict=True):
                each.cached += count
            steps += 1
    assert steps > 100, f"seed {seed}"


def test_tokens_that_are_still_on_the_device() -> None:
    inputs = made()
    for row in range(3):
        inputs.add([7, 8, 9], [row + 1], cached=2)
    inputs.batch()
    inputs.advance()
    inputs.extend_pending([0, 1, 2], torch.tensor([20, 21, 22]))
    assert inputs.batch().token_ids.tolist() == [20, 21, 22]
    assert inputs.batch(rows=[2, 0]).token_ids.tolist() == [22, 20]
    with pytest.raises(BatchError, match="row 1 has a pending token"):
        inputs.extend_pending([1], torch.tensor([3]))
    with pytest.raises(BatchError, match="row 1 has a pending token"):
        inputs.extend(1, [30])
    inputs.extend_each([1], [21])
    inputs.extend(1, [30])
    assert inputs.batch([1, 2, 1]).token_ids.tolist() == [20, 21, 30, 22]
    inputs.extend_each([2, 0], [22, 20])
    inputs.extend_pending([2, 0], torch.tensor([52, 50], dtype=torch.int32))
    assert inputs.batch([2, 2, 2]).token_ids.tolist() == [20, 50, 21, 30, 22, 52]
    inputs.remove(0)
    assert inputs.batch([2], rows=[0]).token_ids.tolist() == [22, 52], "the pending token moves with its row"
    with pytest.raises(BatchError, match=r"token id 1000, out of the range 0 to 999"):
        inputs.extend_each([0], [1000])
    with pytest.raises(BatchError, match=r"1 rows get tokens \[2\]"):
        inputs.extend_pending([1], torch.tensor([1, 2]))
    inputs.extend(1, [7] * 395)
    with pytest.raises(BatchError, match="row 1 has 400 tokens, the most"):
        inputs.extend_pending([1], torch.tensor([1]))


def test_the_tokens_of_a_step_extend_their_rows() -> None:
    inputs = made(rows=3)
    for row in range(3):
        inputs.add([7], [row + 1], cached=0)
    inputs.extend_pending([1], torch.tensor([21]))
    inputs.extend_each([2, 1], [22, 31])
    inputs.extend_each([], [])
    assert inputs.batch([1, 2, 2]).token_ids.tolist() == [7, 7, 31, 7, 22]
    inputs.extend(0, [7] * 398, range(4, 28))
    inputs.extend_each([0], [8])
    with pytest.raises(BatchError, match="row 0 has 400 tokens, the most"):
        inputs.extend_each([1, 0], [1, 2])
    assert inputs.batch([400, 2, 2]).token_ids[-5:].tolist() == [8, 7, 31, 7, 22]


def test_blocks_before_the_window_are_given_away() -> None:
    inputs = made(window=BLOCK + 4)
    tokens = [7] * 5 * BLOCK
    row = inputs.add(tokens, [0, 0, 3, 4, 5], cached=4 * BLOCK)  # reads from 3 * BLOCK - 3 on
    batch = inputs.batch()
    assert batch.block_table[0, :5].tolist() == [3, 3, 3, 4, 5], "a row names its own blocks only"
    assert batch.slot_mapping.tolist() == [5 * BLOCK]
    inputs.set_cached(row, 5 * BLOCK - 1)
    with pytest.raises(BatchError, match=r"one of the blocks \[4\] twice"):
        inputs.extend(row, (), [4])
    inputs.extend(row, [8], [3])  # It is before the window now.
    inputs.extend(inputs.add([7], [2], cached=0), [7])
    batch = inputs.batch([2, 1])
    assert batch.block_table[:, :6].tolist() == [[4, 4, 4, 4, 5, 3], [2, 0, 0, 0, 0, 0]]
    assert batch.slot_mapping.tolist() == [6 * BLOCK - 1, 3 * BLOCK, 2 * BLOCK]
    inputs.remove(row)
    with pytest.raises(BatchError, match="block 0, out of the range 1"):
        inputs.add(tokens, [0, 0, 0, 4, 5], cached=4 * BLOCK)
    with pytest.raises(BatchError, match="block 0, out of the range 1"):
        made().add(tokens, [0, 0, 3, 4, 5], cached=4 * BLOCK)


@attrs.frozen(eq=False)
class Marked(hal.step.Batch):
    """A batch with a field that has to be given, and one that has not."""

    marks: Tensor = field("2 tokens", torch.int32)
    doubled: Tensor = field("tokens", torch.int64, default=lambda batch: batch.positions * 2)


def test_fields_of_a_model() -> None:
    inputs = made(Marked)
    inputs.add([7, 8, 9], [1])
    batch = inputs.batch([3], marks=[[1, 2, 3], [4, 5, 6]])
    assert (batch.marks.tolist(), batch.doubled.tolist()) == ([[1, 2, 3], [4, 5, 6]], [0, 2, 4])
    with pytest.raises(BatchError, match="the field marks of Marked is missing"):
        inputs.batch([3])


@pytest.mark.parametrize(
    ("act", "problem"),
    [
        (lambda it: it.add([1], [2]), "all 2 rows are taken"),
        (lambda it: it.add([], [3]), "a sequence has no tokens"),
        (lambda it: it.extend(2, [1]), "there is no row 2 among 2"),
        (lambda it: it.extend(0, [1000]), "row 0 has token id 1000|sequence 0 has token id 1000"),
        (lambda it: it.extend(0, [1.5]), "not integers"),
        (lambda it: it.extend(0, [], [0]), "block 0, out of the range 1 to 3999"),
        (lambda it: it.extend(0, [], [9, 9]), r"one of the blocks \[9, 9\] twice"),
        (lambda it: it.extend(0, [], [1]), r"one of the blocks \[1\] twice"),
        (lambda it: it.extend(0, [1] * 400), "row 0 would have 403 tokens; a row takes 400"),
        (lambda it: it.set_cached(0, 4), "row 0 has 3 tokens, and 4 are said to be cached"),
        (lambda it: it.truncate(0, 4), "row 0 has 3 tokens, not 4"),
        (lambda it: it.set_blocks(0, [0]), "block 0, out of the range"),
        (lambda it: it.reorder([0, 0]), r"\[0, 0\] is no permutation of 2 rows"),
        (lambda it: it.batch([4, 1]), "row 0 has 3 tokens, 0 of them cached, and 4 are to run"),
        (lambda it: it.batch([1, 0]), "row 1 has no new token"),
        (lambda it: it.batch([1, 17]), "row 1 would have 17 tokens in the cache, but its 1 blocks hold 16"),
        (lambda it: it.batch([1]), "2 rows, 1 numbers of tokens and 2 of cached ones"),
        (lambda it: it.batch([1], rows=[2]), r"the rows \[2\] are not different ones of the 2"),
        (lambda it: it.batch([1, 1], rows=[1, 1]), r"the rows \[1, 1\] are not different"),
        (lambda it: it.batch(rows=[]), "0 rows"),
        (lambda it: it.batch(cached=[0]), "1 of cached ones"),
        (lambda it: it.batch(cached=[0, -1]), "row 1 has 20 tokens, -1 of them cached, and 1 are to run"),
        (lambda it: it.batch(cached=[3, 0]), "row 0 has 3 tokens, 3 of them cached, and 1 are to run"),
        (lambda it: it.extend_each([0, 2], [1, 2]), r"the rows \[0, 2\] are not different ones of the 2"),
        (lambda it: it.extend_each([1, 1], [1, 2]), r"the rows \[1, 1\] are not different ones of the 2"),
        (lambda it: it.extend_each([0, 1], [1]), "2 rows get 1 tokens"),
        (lambda it: it.extend_each([0, 1], [1, 1000]), "token id 1000, out of the range 0 to 999"),
        (lambda it: it.advance([1, 0]), "row 1 has no new token"),
    ],
)
def test_what_is_refused_leaves_the_rows_as_they_were(act: Callable[[InputBatch], Any], problem: str) -> None:
    inputs = made(rows=2)
    inputs.add([5, 6, 7], [1])
    inputs.add([5] * 20, [2])
    with pytest.raises(BatchError, match=problem):
        act(inputs)
    batch = inputs.batch([3, 16])
    assert batch.token_ids.tolist() == [5, 6, 7] + [5] * 16
    assert (len(inputs), batch.block_table[:, 0].tolist()) == (2, [1, 2])


def test_a_slot_is_given_if_and_only_if_it_is_needed() -> None:
    with pytest.raises(BatchError, match="slot is 1, and the model keeps no state per sequence"):
        made().add([1], [1], slot=1)
    with pytest.raises(BatchError, match="slot is None, and the model keeps states per sequence"):
        made(SlotBatch).add([1], [1])


class TestFromTensors:
    def tensors(self, **changed: Any) -> dict[str, Tensor]:
        batch = hal.step.Batch.build([[5, 6], [7]], [[1], [2, 3]], block_size=BLOCK, cached=[0, 20])
        return {name: getattr(batch, name) for name in fields_of(hal.step.Batch)} | changed

    def test_it_is_the_same_batch(self) -> None:
        tensors = self.tensors()
        batch = hal.step.Batch.from_tensors(block_size=BLOCK, bounds=BOUNDS, **tensors)
        assert all(getattr(batch, name) is each for name, each in tensors.items())
        for name in ("kv_lens_host", "query_start_loc_host"):
            del tensors[name]
        assert hal.step.Batch.from_tensors(block_size=BLOCK, **tensors).kv_lens_host is tensors["kv_lens"]

    def test_on_the_host_it_stays_where_it_is(self) -> None:
        batch = hal.step.Batch.from_tensors(block_size=BLOCK, **self.tensors())
        there = batch.to(torch.device("cpu"))
        assert all(getattr(there, name) is getattr(batch, name) for name in fields_of(hal.step.Batch))

    def test_fields_of_a_subclass(self) -> None:
        marks = torch.ones(2, 3, dtype=torch.int32)
        batch = Marked.from_tensors(block_size=BLOCK, marks=marks, **self.tensors())
        assert batch.marks is marks
        assert batch.doubled.tolist() == [0, 2, 40]

    @pytest.mark.parametrize(
        ("name", "value", "problem"),
        [
            ("token_ids", torch.tensor([5, 6, 1000]), "token_ids has 1000, out of the range 0 to 999"),
            ("token_ids", torch.tensor([5, 6, 7], dtype=torch.int32), "is torch.int32 on cpu, not torch.int64"),
            ("token_ids", torch.tensor([5, 6]), r"the shape \[3\], not \[2\]"),
            ("positions", torch.tensor([0, 1, 400]), "positions has 400"),
            ("slot_mapping", torch.tensor([16, 17, 3], dtype=torch.int32), "slot_mapping has 3, out of the range 16"),
            ("block_table", torch.tensor([[1, 0], [2, 0]], dtype=torch.int32), "block_table has 0, out of the range 1"),
            ("block_table", torch.tensor([[1], [2]], dtype=torch.int32), "sequence 1 has the length 21.* take 16"),
            ("kv_lens", torch.tensor([1, 21], dtype=torch.int32), "sequence 0 has the length 1, with 2 new tokens"),
            ("query_start_loc", torch.tensor([0, 3, 3], dtype=torch.int32), r"query_start_loc is \[0, 3, 3\]"),
            ("sots", torch.tensor([1]), "Batch has no field 'sots'"),
        ],
    )
    def test_what_is_refused(self, name: str, value: Tensor, problem: str) -> None:
        tensors = self.tensors(**{name: value})
        if name in ("kv_lens", "query_start_loc"):
            tensors[f"{name}_host"] = value
        with pytest.raises(BatchError, match=problem):
            hal.step.Batch.from_tensors(block_size=BLOCK, bounds=BOUNDS, **tensors)

    def test_a_missing_field(self) -> None:
        tensors = self.tensors()
        del tensors["positions"]
        with pytest.raises(BatchError, match="the field positions of Batch is missing"):
            hal.step.Batch.from_tensors(block_size=BLOCK, **tensors)


def test_states_that_a_step_keeps() -> None:
    inputs = made(rollback_batch(SlotBatch, 3))
    inputs.add([7] * 9, [1, 2], slot=5, spare_slots=[3, 4])
    inputs.batch([9])
    inputs.advance([9])
    assert inputs.slot_after(0, 8) == 4
    inputs.truncate(0, 8)
    inputs.extend(0, [6])
    batch = inputs.batch()
    assert batch.slots.tolist() == [4]
    assert batch.write_slots.tolist() == [[3, 5, 4]]
    with pytest.raises(BatchError, match="the states of row 0 after 2 tokens are not kept"):
        inputs.truncate(0, 2)
    with pytest.raises(BatchError, match="a sequence gets 1 slots, and a step keeps 3 states of it"):
        inputs.add([7], [3], slot=6)
