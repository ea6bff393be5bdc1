"""Tests for penalties and masks of generated texts on the NPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
from hal.backends.npu import emulator
from helpers.penalizing import by_hand, mask_of, together

import hal

Opened = Callable[..., hal.Backend]
PLAIN = hal.SamplingParams(max_new_tokens=8)
PENALIZED = attrs.evolve(PLAIN, repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=0.5)
PROMPTS = [[5, 6, 7], [8] * 140, [9, 200, 3, 17], [1000] * 20]


def runner_of(npu: Opened, trained: Path, compiler: str) -> hal.Runner:
    compilation = {"compiler": compiler, "capture_sizes": [1, 2, 4]}
    backend = npu(cache={"num_tokens": 2048}, dtype="float16", compilation=compilation, strict=True)
    return hal.Runner(hal.load_model(trained, backend), backend)


def test_penalties_are_those_of_a_loop(npu: Opened, trained: Path) -> None:
    runner = runner_of(npu, trained, "eager")
    several = [PENALIZED, PLAIN, attrs.evolve(PENALIZED, temperature=0.8, seed=5), PENALIZED]
    expected = [by_hand(runner, *each) for each in zip(PROMPTS, several, strict=True)]
    assert together(runner, PROMPTS, several) == expected
    assert expected[0] != by_hand(runner, PROMPTS[0], PLAIN)


@pytest.mark.parametrize("compiler", ["eager", "graph"])
def test_a_batch_changes_nothing(npu: Opened, trained: Path, compiler: str) -> None:
    """Neither do the other prompts' penalties and masks, nor the order in which streams run."""
    runner = runner_of(npu, trained, compiler)
    words = range(3, runner.model.vocab_size, 5)
    masked = attrs.evolve(PENALIZED, mask=lambda generated: mask_of(words, runner.model.vocab_size))
    several = [PENALIZED, PLAIN, masked, attrs.evolve(masked, temperature=0.7, seed=2)]
    several = [attrs.evolve(each, max_new_tokens=6 + 2 * row) for row, each in enumerate(several)]
    alone = [together(runner, [prompt], [each])[0] for prompt, each in zip(PROMPTS, several, strict=True)]
    for seed in range(2):
        with emulator.schedule(seed):
            assert together(runner, PROMPTS, several) == alone
    assert all(token in words for tokens in alone[2:] for token in tokens)
