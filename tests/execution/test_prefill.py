"""Tests for prefill in steps: every split of a batch gives the same result, and long prompts need bounded memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from helpers import large_checkpoint
from helpers.reference import open_runner
from hypothesis import given
from hypothesis import strategies as st

import hal
from hal.errors import BatchError

LENGTHS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 40)), min_size=1, max_size=6)


@given(LENGTHS, st.integers(1, 50), st.booleans())
def test_steps_cover_each_token_once(lengths: list[tuple[int, int]], most: int, all_logits: bool) -> None:
    """Check the tokens that each token attends to and its cache slot, derived from the steps alone."""
    block_size, used = 4, 1
    blocks = []
    for cached, new in lengths:
        count = -(-(cached + new) // block_size)
        blocks.append(list(range(used, used + count)))
        used += count
    tokens = [[100 * row + index for index in range(new)] for row, (_, new) in enumerate(lengths)]
    cached = [each for each, _ in lengths]
    batch = hal.Batch.build(tokens, blocks, block_size=block_size, cached=cached, all_logits=all_logits)
    steps = batch.split(most)
    assert all(1 <= step.num_tokens <= most for step in steps)
    assert sum(step.num_tokens for step in steps) == batch.num_tokens

    seen, wanted, first = [], [], 0
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
        wanted += [first + index for index in step.logits_indices.tolist()]
        first += step.num_tokens
    assert seen == [
        (token, start + index) for row, start in enumerate(cached) for index, token in enumerate(tokens[row])
    ]
    assert wanted == batch.logits_indices.tolist()


@pytest.mark.parametrize("most", [1, 3, 16, 59])
@pytest.mark.parametrize("all_logits", [False, True])
def test_logits_do_not_depend_on_the_steps(most: int, all_logits: bool, trained: Path) -> None:
    runner = open_runner(trained)
    generator = torch.Generator().manual_seed(7)
    tokens = [torch.randint(0, 4096, (length,), generator=generator).tolist() for length in (1, 17, 40, 2)]
    blocks = [runner.blocks.take(runner.spec.blocks_for(len(each))) or [] for each in tokens]
    batch = runner.batch(tokens, blocks, all_logits=all_logits)
    expected = runner.step(batch).logits
    runner.backend.configure(attrs.evolve(runner.backend.config, max_prefill_tokens=most))
    found = runner.step(batch).logits
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_unsorted_logits_are_refused_where_they_cannot_be_given(trained: Path) -> None:
    runner = open_runner(trained)
    batch = runner.batch([[1, 2, 3]], [runner.blocks.take(1) or []], all_logits=True)
    turned = attrs.evolve(batch, logits_indices=batch.logits_indices.flip(0))
    assert torch.equal(runner.step(turned).logits, runner.step(batch).logits.flip(0))
    runner.backend.configure(attrs.evolve(runner.backend.config, max_prefill_tokens=2))
    for wrong in (turned, attrs.evolve(batch, logits_indices=torch.tensor([-1]))):
        with pytest.raises(BatchError, match="logits_indices"):
            runner.step(wrong)
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
before = backend.device.memory_stats().allocated
logits = runner.step(batch).logits
assert logits.isfinite().all()
print(backend.device.memory_stats().peak - before)
"""


def test_a_long_prompt_takes_bounded_memory(tmp_path: Path) -> None:
    """A prompt of 32,768 tokens, whose MLP activations alone would take 400 MB at once."""
    large_checkpoint.write(
        tmp_path, num_hidden_layers=1, hidden_size=256, intermediate_size=3072, num_attention_heads=2, head_dim=64,
        num_key_value_heads=1, vocab_size=1000, max_position_embeddings=40960,
    )  # fmt: skip
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(result.stdout) < 150 << 20
