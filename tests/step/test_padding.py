"""Tests of batches that are extended by sequences of padding."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

import hal
from hal.step import SlotBatch, fields_of
from hal.step.fields import DUMMY_BLOCK, DUMMY_SLOT
from hal.step.padding import extended, padding_batch

BLOCK = 16


def _batch(lengths: list[int], cached: list[int], batch_type: type[hal.step.Batch] = hal.step.Batch) -> hal.step.Batch:
    blocks = [list(range(1 + 8 * row, 9 + 8 * row)) for row in range(len(lengths))]
    fields = {"slots": list(range(1, len(lengths) + 1))} if batch_type is SlotBatch else {}
    return batch_type.build(
        [list(range(5, 5 + length)) for length in lengths], blocks, block_size=BLOCK, cached=cached, fields=fields
    )


@pytest.mark.parametrize("batch_type", [hal.step.Batch, SlotBatch])
@pytest.mark.parametrize("seed", range(3))
def test_the_sequences_come_after_those_of_the_batch(batch_type: type[hal.step.Batch], seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(10):
        lengths = [draw.randint(1, 40) for _ in range(draw.randint(1, 4))]
        batch = _batch(lengths, [draw.randint(0, 30) for _ in lengths], batch_type)
        added = [draw.randint(1, 200) for _ in range(draw.randint(1, 3))]
        padding = padding_batch(batch_type, added, block_size=BLOCK, device=torch.device("cpu"))
        padding.check()
        made = extended(batch, padding)
        made.check()
        assert type(made) is batch_type
        assert made.num_tokens == sum(lengths) + sum(added)
        assert made.query_start_loc.diff().tolist() == [*lengths, *added]
        assert torch.equal(made.query_start_loc, made.query_start_loc_host)
        assert made.kv_lens.tolist() == [*batch.kv_lens.tolist(), *added]
        assert torch.equal(made.kv_lens, made.kv_lens_host)
        for name in fields_of(batch_type):
            given, found = getattr(batch, name), getattr(made, name)
            assert found.dtype == given.dtype
            if name != "block_table":
                assert torch.equal(found[: given.shape[0]], given), name
        rows, width = batch.block_table.shape
        assert torch.equal(made.block_table[:rows, :width], batch.block_table)
        assert (made.block_table[rows:] == DUMMY_BLOCK).all()
        assert (made.slot_mapping[batch.num_tokens :] // BLOCK == DUMMY_BLOCK).all()
        if batch_type is SlotBatch:
            assert (made.slots[len(lengths) :] == DUMMY_SLOT).all()


def test_the_logits_of_the_batch_stay(trained: Path, cpu: hal.Backend) -> None:
    with hal.Runner(hal.load_model(trained, cpu), cpu) as runner:
        size = runner.spec.block_size
        batch = runner.batch([[3, 4, 5], [6]], [[1], [2]])
        padding = padding_batch(hal.step.Batch, [20, 1], block_size=size, device=cpu.device.torch)
        alone = runner.step(batch).logits.clone()
        together = runner.step(extended(batch, padding)).logits
        assert together.shape[0] == 4
        torch.testing.assert_close(together[:2], alone)
