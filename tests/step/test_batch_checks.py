"""Tests that a batch is checked where it is made: whatever is wrong is refused by name, and changes nothing."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from torch import Tensor

import hal
from hal.device.host_device import HostDevice
from hal.errors import BatchError
from hal.step import Bounds, InputBatch, SlotBatch, field, fields_of
from hal.step.block_allocator import SlotAllocator

BLOCK, VOCABULARY, BLOCKS, LONGEST = 4, 100, 400, 64
BOUNDS = Bounds(VOCABULARY, 1, BLOCKS, LONGEST)
WRONG = [0.5, 1.5, None, True, "1", [1], Fraction(1, 2), float("nan"), 2**70, -(2**70)]
"""Values that are no row, count or length."""


def made(**changed: Any) -> InputBatch:
    given: dict[str, Any] = {"max_sequences": 3, "max_length": LONGEST, "block_size": BLOCK}
    return InputBatch(hal.step.Batch, device=HostDevice(), bounds=BOUNDS, **given | changed)


def filled() -> InputBatch:
    """Return an input batch with two sequences and room for a third."""
    inputs = made()
    inputs.add([5, 6, 7, 8, 9], [1, 2], cached=2)
    inputs.add([3, 4], [3], cached=1)
    return inputs


def contents(inputs: InputBatch) -> dict[str, Any]:
    """Return all that an input batch remembers of its rows."""
    return {
        name: value[: len(inputs)].tolist() if isinstance(value, np.ndarray | Tensor) and value.ndim else value
        for name, value in vars(copy.deepcopy(inputs)).items()
        if name in ("_size", "_tokens", "_table", "_lengths", "_cached", "_blocks", "_slots", "_pending", "sampled")
    }


CALLS: Mapping[str, tuple[str, Callable[[InputBatch, Any], Any]]] = {
    "add: tokens": ("token id", lambda it, wrong: it.add([1, wrong], [4])),
    "add: all tokens": ("token", lambda it, wrong: it.add(wrong, [4])),
    "add: blocks": ("block", lambda it, wrong: it.add([1, 2], [wrong])),
    "add: all blocks": ("block", lambda it, wrong: it.add([1, 2], wrong)),
    "add: cached": ("cached", lambda it, wrong: it.add([1, 2], [4], cached=wrong)),
    "extend: row": ("row", lambda it, wrong: it.extend(wrong, [1])),
    "extend: tokens": ("token id", lambda it, wrong: it.extend(0, [wrong], [7])),
    "extend: all tokens": ("token", lambda it, wrong: it.extend(0, wrong, [7])),
    "extend: blocks": ("block", lambda it, wrong: it.extend(0, [1], [wrong])),
    "extend: all blocks": ("block", lambda it, wrong: it.extend(0, [1], wrong)),
    "extend_each: rows": ("row", lambda it, wrong: it.extend_each([0, wrong], [1, 1])),
    "extend_each: all rows": ("rows", lambda it, wrong: it.extend_each(wrong, [1, 1])),
    "extend_each: tokens": ("token id", lambda it, wrong: it.extend_each([0, 1], [1, wrong])),
    "extend_each: all tokens": ("token", lambda it, wrong: it.extend_each([0, 1], wrong)),
    "extend_pending: rows": ("row", lambda it, wrong: it.extend_pending([0, wrong], torch.tensor([1, 1]))),
    "extend_pending: tokens": ("tokens", lambda it, wrong: it.extend_pending([0, 1], wrong)),
    "set_cached: row": ("row", lambda it, wrong: it.set_cached(wrong, 1)),
    "set_cached: cached": ("cached", lambda it, wrong: it.set_cached(0, wrong)),
    "set_blocks: row": ("row", lambda it, wrong: it.set_blocks(wrong, [7])),
    "set_blocks: blocks": ("block", lambda it, wrong: it.set_blocks(0, [7, wrong])),
    "set_blocks: all blocks": ("block", lambda it, wrong: it.set_blocks(0, wrong)),
    "truncate: row": ("row", lambda it, wrong: it.truncate(wrong, 1)),
    "truncate: length": ("length", lambda it, wrong: it.truncate(0, wrong)),
    "remove": ("row", lambda it, wrong: it.remove(wrong)),
    "reorder: rows": ("rows", lambda it, wrong: it.reorder([0, wrong])),
    "reorder: all rows": ("rows", lambda it, wrong: it.reorder(wrong)),
    "batch: num_tokens": ("num_tokens", lambda it, wrong: it.batch([1, wrong])),
    "batch: rows": ("row", lambda it, wrong: it.batch(rows=[0, wrong])),
    "batch: cached": ("cached", lambda it, wrong: it.batch(cached=[1, wrong])),
    "batch: fields": ("nothing", lambda it, wrong: it.batch(cached=[1, 0], nothing=wrong)),
    "advance: num_tokens": ("num_tokens", lambda it, wrong: it.advance([1, wrong])),
    "advance: rows": ("row", lambda it, wrong: it.advance(rows=[0, wrong])),
}


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
@pytest.mark.parametrize("call", CALLS)
def test_what_is_refused_is_named_and_changes_nothing(call: str, wrong: Any) -> None:
    name, act = CALLS[call]
    if wrong == [1] and isinstance(wrong, list) and "all" in call:
        wrong = [[1]]  # [1] alone is right.
    inputs = filled()
    before = contents(inputs)
    with pytest.raises(BatchError, match=name):
        act(inputs, wrong)
    assert contents(inputs) == before
    assert inputs.batch().token_ids.tolist() == [7, 4]


@pytest.mark.parametrize(
    ("kind", "act"),
    [
        (np.array, lambda it, kind: it.batch(kind([1, 1]), rows=kind([1, 0]), cached=kind([1, 2]))),
        (np.array, lambda it, kind: it.reorder(kind([1, 0]))),
        (np.array, lambda it, kind: it.extend_each(kind([0, 1]), kind([1, 1]))),
        (tuple, lambda it, kind: it.batch(kind([1, 1]), rows=kind([1, 0]))),
        (lambda values: [*map(np.int32, values)], lambda it, kind: it.batch(kind([1, 1]), rows=kind([1, 0]))),
        (range, lambda it, kind: it.batch(rows=kind(2))),
    ],
)
def test_integers_of_other_types(kind: Any, act: Callable[[InputBatch, Any], Any]) -> None:
    act(filled(), kind)


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.bool_, object])
def test_arrays_of_other_types(kind: Any) -> None:
    with pytest.raises(BatchError, match="num_tokens is array"):
        filled().batch(np.ones(2, kind))


def test_sums_above_64_bits() -> None:
    with pytest.raises(BatchError, match="row 0 has 5 tokens, 9223372036854775807 of them cached, and 1 are to run"):
        filled().batch([1, 1], cached=[2**63 - 1, 0])
    with pytest.raises(BatchError, match="row 1 has 2 tokens, 1 of them cached, and 9223372036854775807 are to run"):
        filled().batch([1, 2**63 - 1])


@pytest.mark.parametrize("wrong", [-1, 0, 0.5, 1.5, None, True, "3"])
@pytest.mark.parametrize("name", ["max_sequences", "max_length", "block_size", "window"])
def test_sizes_of_an_input_batch(name: str, wrong: Any) -> None:
    if name == "window" and wrong is None:
        assert len(made(windows=[None])) == 0  # No window.
        return
    with pytest.raises(BatchError, match=f"{name} is {wrong!r}, not an integer of 1 or more"):
        made(**({"windows": [wrong]} if name == "window" else {name: wrong}))


@pytest.mark.parametrize("wrong", [-1, 0.5, None, True])
@pytest.mark.parametrize("name", ["vocab_size", "first_block", "num_blocks", "max_length"])
def test_bounds(name: str, wrong: Any) -> None:
    with pytest.raises(BatchError, match=f"{name} is {wrong!r}, not an integer"):
        Bounds(**{name: wrong})


@pytest.mark.parametrize("wrong", [-1, 0, 0.5, True, "1"])
def test_slots_of_sequences(wrong: Any) -> None:
    inputs = InputBatch(
        SlotBatch, max_sequences=2, max_length=LONGEST, block_size=BLOCK, device=HostDevice(), bounds=BOUNDS
    )
    with pytest.raises(BatchError, match=f"slot is {wrong!r}"):
        inputs.add([1], [1], slot=wrong)
    assert len(inputs) == 0
    with pytest.raises(BatchError, match=r"the field slots is torch.float32, not torch.int32"):
        SlotBatch.build([[1]], [[1]], block_size=BLOCK, fields={"slots": [1.5]})


def test_slots_stay_free_if_their_reset_fails() -> None:
    def fails(slots: Any) -> None:
        raise RuntimeError("the device is lost")

    slots = SlotAllocator(4, fails)
    with pytest.raises(RuntimeError):
        slots.take(2)
    assert slots.num_free == 3
    assert slots.take(-1) is None


def test_no_token_at_all() -> None:
    sizes = dict.fromkeys(("tokens", "sequences", "rows", "blocks"), 0)
    empty = {name: torch.zeros(each.shape(sizes), dtype=each.dtype) for name, each in fields_of(hal.step.Batch).items()}
    with pytest.raises(BatchError, match="token_ids has 0 tokens, of 0 sequences"):
        hal.step.Batch.from_tensors(block_size=BLOCK, **empty)
    with pytest.raises(BatchError, match="token_ids has 0 tokens"):
        hal.step.Batch(**empty).check()
    for given in ([], [[]]):
        with pytest.raises(BatchError):
            hal.step.Batch.build(given, [[1]] * len(given), block_size=BLOCK)
    with pytest.raises(BatchError, match="0 rows"):
        made().batch()


@attrs.frozen(eq=False)
class Marked(hal.step.Batch):
    marks: Tensor = field("sequences", torch.int32)


def drawn(draw: random.Random) -> dict[str, Tensor]:
    """Return the tensors of a valid batch: sequences share full blocks, and may be longer than what they run."""
    sequences, shared, free = draw.randint(1, 5), draw.randint(0, 2), list(range(1, BLOCKS))
    draw.shuffle(free)
    prefix = [free.pop() for _ in range(shared)]
    tokens, blocks, cached = [], [], []
    for _ in range(sequences):
        begin = shared * BLOCK if prefix and draw.random() < 0.6 else 0
        before = begin + draw.randint(0, 6)
        count = draw.choice((1, 1, draw.randint(1, 9)))
        own = [free.pop() for _ in range(-(-(before + count) // BLOCK) - begin // BLOCK + draw.randint(0, 2))]
        tokens.append([draw.randrange(VOCABULARY) for _ in range(count)])
        blocks.append([*(prefix if begin else ()), *own])
        cached.append(before)
    batch = hal.step.Batch.build(tokens, blocks, block_size=BLOCK, cached=cached, bounds=BOUNDS)
    found = {name: getattr(batch, name) for name in fields_of(hal.step.Batch)}
    after = torch.arange(found["block_table"].shape[1]) * BLOCK >= found["kv_lens"].unsqueeze(1)
    if draw.random() < 0.5:  # What is left of earlier sequences.
        found["block_table"] = torch.where(after, draw.randrange(2**31), found["block_table"]).to(torch.int32)
    if draw.random() < 0.5:
        del found["kv_lens_host"], found["query_start_loc_host"]
    return found


def with_value(found: dict[str, Tensor], name: str, at: int, value: int) -> dict[str, Tensor]:
    tensor = found[name].clone()
    tensor.view(-1)[at] = value
    return {**found, name: tensor}


def corrupted(draw: random.Random, found: dict[str, Tensor], kind: str) -> tuple[dict[str, Tensor], str] | None:
    """Return the batch with one mistake, and what the error must name; None if the batch cannot have the mistake."""
    token, row = draw.randrange(len(found["token_ids"])), draw.randrange(len(found["kv_lens"]))
    match kind:
        case "lengths unlike positions":
            wrong = int(found["kv_lens"][row]) + draw.choice((-1, 1))
            twin = {} if "kv_lens_host" not in found else with_value(found, "kv_lens_host", row, wrong)
            return {
                **twin,
                **with_value(twin or found, "kv_lens", row, wrong),
            }, "positions.*kv_lens|in kv_lens|block_table has"
        case "positions unlike lengths":
            at = int(found["positions"][token])
            return with_value(found, "positions", token, draw.choice([*{*range(LONGEST)} - {at}])), "positions"
        case "a slot of another row":
            slots = {*found["slot_mapping"].tolist()}
            others = [each for each in range(BLOCK, BLOCKS * BLOCK) if each not in slots]
            return with_value(found, "slot_mapping", token, draw.choice(others)), "slot_mapping"
        case "one slot for two tokens":
            if len(found["token_ids"]) == 1:
                return None
            other = draw.choice([*{*range(len(found["token_ids"]))} - {token}])
            return with_value(found, "slot_mapping", token, int(found["slot_mapping"][other])), "slot_mapping"
        case "one block for two rows":
            starts = found["query_start_loc"].tolist()
            if len(starts) == 2:
                return None
            # A block of new tokens in the place of another sequence's, with the slots that it gives.
            other = (row + 1) % len(found["kv_lens"])
            column, of = int(found["positions"][starts[row]]) // BLOCK, int(found["positions"][starts[other]]) // BLOCK
            table = found["block_table"].clone()
            table[row, column] = table[other, of]
            changed = {**found, "block_table": table}
            rows = torch.arange(len(table)).repeat_interleave(found["query_start_loc"].diff())
            places = found["positions"]
            slots = table[rows, places // BLOCK] * BLOCK + places % BLOCK
            if len(slots.unique()) == len(slots):
                return None
            return {**changed, "slot_mapping": slots.to(torch.int32)}, "slot_mapping has . twice|slot_mapping"
        case "another block in the table":
            column = int(found["positions"][token]) // BLOCK
            row = int((found["query_start_loc"][1:] <= token).sum())
            at = row * found["block_table"].shape[1] + column
            present = int(found["block_table"].view(-1)[at])
            return with_value(found, "block_table", at, present % (BLOCKS - 1) + 1), "block_table"
        case "a host twin":
            name = draw.choice(("kv_lens", "query_start_loc"))
            if f"{name}_host" not in found:
                return None
            at = draw.randrange(len(found[name]))
            return with_value(found, name, at, int(found[name][at]) + 1), f"{name} is .*{name}_host is"
    raise AssertionError(kind)


def refusal(tensors: Mapping[str, Tensor]) -> str:
    """Return why the tensors are refused; empty if they are not."""
    try:
        hal.step.Batch.from_tensors(block_size=BLOCK, bounds=BOUNDS, **tensors)
    except BatchError as error:
        return error.problem
    return ""


KINDS = (
    "lengths unlike positions",
    "positions unlike lengths",
    "a slot of another row",
    "one slot for two tokens",
    "one block for two rows",
    "another block in the table",
    "a host twin",
)


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_that_contradict_each_other(kind: str) -> None:
    checked = 0
    for seed in range(150):
        draw = random.Random(f"{kind} {seed}")
        found = drawn(draw)
        batch = hal.step.Batch.from_tensors(block_size=BLOCK, bounds=BOUNDS, **found)  # It is right, and taken.
        assert batch.num_tokens == len(found["token_ids"])
        if (wrong := corrupted(draw, found, kind)) is None:
            continue
        checked += 1
        problem = refusal(wrong[0])
        assert re.search(wrong[1], problem), f"seed {seed}: {problem or 'it is taken'}: {wrong[0]}"
    assert checked > 20


def test_batches_of_padding_are_taken() -> None:
    """Rows of an engine that pads its tensors: all write to the dummy block, to whatever slot."""
    padded = {
        "token_ids": torch.tensor([5, 6, 0, 0]),
        "positions": torch.tensor([0, 1, 0, 0]),
        "slot_mapping": torch.tensor([4, 5, 3, 3], dtype=torch.int32),
        "block_table": torch.tensor([[1], [0], [0]], dtype=torch.int32),
        "kv_lens": torch.tensor([2, 1, 1], dtype=torch.int32),
        "query_start_loc": torch.tensor([0, 2, 3, 4], dtype=torch.int32),
    }
    assert hal.step.Batch.from_tensors(block_size=BLOCK, **padded).num_sequences == 3
    with pytest.raises(BatchError, match="slot_mapping has 3, out of the range 4"):  # Sequences do not own the block.
        hal.step.Batch.from_tensors(block_size=BLOCK, bounds=BOUNDS, **padded)


def test_sequences_that_write_to_one_block() -> None:
    with pytest.raises(BatchError, match="block_ids give the tokens 0 and 2 of the batch the same place in block 1"):
        hal.step.Batch.build([[5, 6], [7]], [[1], [1]], block_size=BLOCK)
    shared = hal.step.Batch.build([[5], [7]], [[1, 2], [1, 3]], block_size=BLOCK, cached=[4, 4])
    assert shared.slot_mapping.tolist() == [8, 12]
