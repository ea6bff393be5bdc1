"""Tests for decode steps compiled by Inductor that the emulated CUDA computes in minutes."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import reference

import hal
from hal import ops


def tokens(runner: hal.Runner, prompts: list[list[int]]) -> list[list[int]]:
    texts: list[list[int]] = [[] for _ in prompts]
    for token in hal.generate(runner, prompts, hal.SamplingParams(max_new_tokens=4)):
        texts[token.prompt_index].append(token.token_id)
    return texts


@pytest.mark.parametrize("count", [1, 3])
def test_the_trained_checkpoint_gives_the_cpus_tokens(count: int, trained: Path) -> None:
    """Decode few tokens, because the interpreter is slow.

    Operations that Inductor does not compile use torch's kernels.
    """
    prompts = reference.prompts(trained)[:count]
    expected = tokens(reference.open_runner(trained), prompts)
    kernels = {**dict.fromkeys(ops.catalogue(), "reference"), "linear": "torch", "paged_attention": "torch"}
    backend = hal.open(
        {
            "backend": "cuda",
            "dtype": "float32",
            "compilation": {"compiler": "inductor"},
            "cache": {"num_tokens": 1024},
            "options": {"kernels": kernels},
        }
    )
    assert tokens(hal.Runner(hal.load_model(trained, backend), backend), prompts) == expected
