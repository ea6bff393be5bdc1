"""Tests for prefill in steps: every split of a batch gives the same result, and long prompts need bounded memory."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from helpers import large_checkpoint
from helpers.reference import open_runner
from helpers.thorough import LONG, thorough
from hypothesis import given
from hypothesis import strategies as st

import hal
from hal.errors import BatchError
from hal.step import ALL, LAST, NONE, Wanted, split_batch
from hal.step.rows import taken

LENGTHS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 40)), min_size=1, max_size=6)


@given(LENGTHS, st.integers(1, 50), st.integers(0, 100))
def test_steps_cover_each_token_once(lengths: list[tuple[int, int]], most: int, seed: int) -> None:
    """Check the tokens that each token attends to, its cache slot and its row, derived from the steps alone."""
    block_size, used = 4, 1
    blocks = []
    for cached, new in lengths:
        count = -(-(cached + new) // block_size)
        blocks.append(list(range(used, used + count)))
        used += count
    tokens = [[100 * row + index for index in range(new)] for row, (_, new) in enumerate(lengths)]
    cached = [each for each, _ in lengths]
    batch = hal.step.Batch.build(tokens, blocks, block_size=block_size, cached=cached)
    asked = random.Random(seed).choices(range(batch.num_tokens), k=seed % 7)
    last = [end - 1 for end in batch.query_start_loc.tolist()[1:]]
    choices: list[tuple[Wanted, list[int]]] = [
        (LAST, last),
        (ALL, list(range(batch.num_tokens))),
        (NONE, []),
        (torch.tensor(asked, dtype=torch.int64), asked),
    ]
    for rows, expected in choices:
        parts = split_batch(batch, rows, most)
        found, before = [torch.tensor([], dtype=torch.int64)], 0
        for part, wanted in parts.steps:
            shown = torch.arange(before, before + part.num_tokens)
            found.append(taken(shown, wanted, part, part.shape))
            before += part.num_tokens
        assert parts.join(found).tolist() == expected
    steps = batch.split(most)
    assert all(1 <= step.num_tokens <= most for step in steps)
    assert sum(step.num_tokens for step in steps) == batch.num_tokens

    seen = []
    for step in steps:
        starts, kv_lens = step.query_start_loc.tolist(), step.kv_lens.tolist()
        assert (starts, kv_lens) == (step.query_start_loc_host.tolist(), step.kv_lens_host.tolist())
        assert (starts[0], starts[-1]) == (0, step.num_tokens)
        for row, length in enumerate(kv_lens):
            for index in range(starts[row], starts[row + 1]):
                position = length - starts[row + 1] + index
                assert position == step.positions[index]
                block = int(step.block_table[row, position // block_size])
                assert block * block_size + position % block_size == step.slot_mapping[index]
                seen.append((int(step.token_ids[index]), position))
    assert seen == [
        (token, start + index) for row, start in enumerate(cached) for index, token in enumerate(tokens[row])
    ]


@pytest.mark.parametrize("most", [1, 3, 16, 59])
@pytest.mark.parametrize("rows", [LAST, ALL, torch.tensor([59, 0, 18, 18, 57])], ids=["last", "all", "some"])
def test_logits_do_not_depend_on_the_steps(most: int, rows: Wanted, trained: Path) -> None:
    runner = open_runner(trained)
    generator = torch.Generator().manual_seed(7)
    tokens = [torch.randint(0, 4096, (length,), generator=generator).tolist() for length in (1, 17, 40, 2)]
    blocks = [runner.blocks.take(runner.spec.blocks_for(len(each))) or [] for each in tokens]
    batch = runner.batch(tokens, blocks)
    whole = runner.step(batch, rows)
    expected = whole.logits
    runner.backend.configure(attrs.evolve(runner.backend.config, max_prefill_tokens=most))
    parts = runner.step(batch, rows)
    for found, one in ((parts.logits, expected), (parts.hidden_states, whole.hidden_states)):
        assert found.shape == one.shape
        assert (found - one).abs().max() <= 1e-4 * one.abs().max()


@pytest.mark.parametrize("rows", [LAST, torch.tensor([59, 0, 18, 18, 57])], ids=["last", "some"])
def test_an_engine_runs_the_steps_itself(rows: Wanted, trained: Path) -> None:
    runner = open_runner(trained)
    tokens = [list(range(5, 5 + length)) for length in (1, 17, 40, 2)]
    blocks = [runner.blocks.take(runner.spec.blocks_for(len(each))) or [] for each in tokens]
    batch = runner.batch(tokens, blocks)
    expected = runner.step(batch, rows).logits
    parts = split_batch(batch, rows, 16)
    found = []
    for part, wanted in parts.steps:
        output = runner.step(part, wanted)
        if wanted is not NONE:
            found.append(output.logits.clone())
    torch.testing.assert_close(parts.join(found), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(BatchError, match="rows has 60, out of the range 0 to 59"):
        split_batch(batch, torch.tensor([60]), 16)


def test_steps_of_no_tokens_are_refused() -> None:
    batch = hal.step.Batch.build([[1, 2, 3]], [[1]], block_size=4)
    wrong_steps: tuple[Any, ...] = (0, -1, 1.5, "2", None)
    for steps in wrong_steps:
        with pytest.raises(BatchError, match="set max_tokens to an integer of 1 or more"):
            batch.split(steps)


PROGRAM = """
import sys, hal, torch
backend = hal.open({"backend": "cpu", "cache": {"num_tokens": 32768 + 64}})
model = hal.load_model(sys.argv[1], backend)
runner = hal.Runner(model, backend)
with torch.inference_mode():
    for _, cache in runner.states.tensors():
        cache.zero_()
length = 32768
blocks = runner.blocks.take(runner.spec.blocks_for(length))
batch = runner.batch([[token % 1000 for token in range(length)]], [blocks])
backend.device.reset_peak()  # that of loading, which measures products on copies of weights
before = backend.device.memory_stats().allocated
logits = runner.step(batch).logits
assert logits.isfinite().all()
print(backend.device.memory_stats().peak - before)
"""


@thorough(LONG)
def test_a_long_prompt_takes_bounded_memory(tmp_path: Path) -> None:
    """A prompt of 32,768 tokens, whose MLP activations alone would take 400 MB at once."""
    large_checkpoint.write(
        tmp_path,
        num_hidden_layers=1,
        hidden_size=256,
        intermediate_size=3072,
        num_attention_heads=2,
        head_dim=64,
        num_key_value_heads=1,
        vocab_size=1000,
        max_position_embeddings=40960,
    )
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    # glibc otherwise keeps freed activations in its heap, from 0 to 80 MB of them by luck; see mallopt(3).
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert int(result.stdout) < 110 << 20
