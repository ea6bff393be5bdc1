"""Tests that steps from an input batch give the tokens of hal.generate, with every form of a step."""

from __future__ import annotations

from pathlib import Path

import pytest

import hal
from hal import ops
from hal.step import last_rows

PROMPTS = [[5, 6, 7], list(range(20, 90)), [9]]


@pytest.mark.parametrize("compiler", ["eager", "graph", "piecewise"])
def test_the_tokens_are_those_of_generate(trained: Path, compiler: str) -> None:
    backend = hal.open(
        {
            "backend": "cpu",
            "dtype": "float32",
            "cache": {"num_tokens": 512, "block_size": 16},
            "compilation": {"compiler": compiler, "capture_sizes": [1, 2, 4]},
        }
    )
    runner = hal.Runner(hal.load_model(trained, backend), backend, max_sequences=4)
    expected: list[list[int]] = [[] for _ in PROMPTS]
    for token in hal.generate(runner, PROMPTS, hal.SamplingParams(max_new_tokens=8)):
        expected[token.prompt_index].append(token.token_id)
    inputs, found = runner.input_batch(4), [list[int]() for _ in PROMPTS]
    for prompt in PROMPTS:
        inputs.add(prompt, runner.blocks.take(runner.spec.blocks_for(len(prompt) + 8)) or [])
    # The long prompt takes three steps, beside the first tokens of the others.
    counts, ends = [3, 30, 1], [1, 0, 1]
    chunks = iter([30, 10])
    for _ in range(10):
        logits = runner.step(inputs.batch(counts), last_rows(counts, ends)).logits
        tokens = iter(ops.greedy_sample(logits).tolist())
        inputs.advance(counts)
        for row in (row for row, end in enumerate(ends) if end):
            found[row].append(next(tokens))
            inputs.extend(row, found[row][-1:])
        counts = [1, next(chunks, 1), 1]
        ends = [1, int(counts[1] < 30), 1]
    assert [each[:8] for each in found] == expected
