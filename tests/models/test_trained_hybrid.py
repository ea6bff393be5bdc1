"""The trained checkpoint with recurrent layers, attention and experts: against transformers, over long texts."""

from __future__ import annotations

import pytest
import torch
from helpers import repeated_names
from helpers.comparison import difference, their_logits
from helpers.repeated_names import FOLDER
from helpers.thorough import MODE, thorough

import hal
from hal.step import ALL

transformers = pytest.importorskip("transformers", reason="transformers is the reference")


@pytest.fixture(scope="module")
def texts() -> tuple[list[list[int]], list[list[int]]]:
    """Return texts that ask for a name 1,200 tokens later, and the names."""
    return repeated_names.prompts(hal.Checkpoint.open(FOLDER))


@pytest.fixture(scope="module")
def text(texts: tuple[list[list[int]], list[list[int]]]) -> list[int]:
    return texts[0][0]


def open_runner(compiler: str) -> hal.Runner:
    compilation = {"compiler": compiler} | ({} if compiler == "eager" else {"capture_sizes": [1, 2]})
    cache = {"num_tokens": 4096, "block_size": 16, "num_sequences": 4}
    config = {"backend": "cpu", "dtype": "float32", "compilation": compilation, "max_prefill_tokens": 500}
    backend = hal.open({**config, "cache": cache})
    return hal.Runner(hal.load_model(FOLDER, backend), backend)


def test_a_text_of_1200_tokens_in_steps(text: list[int]) -> None:
    """Its beginning reaches the end through the states: another name gives other logits there."""
    runner = open_runner("eager")
    theirs = their_logits(transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval(), text)
    other = [text[1], text[0], *text[2:]]
    ours = []
    for tokens in (text, other):
        blocks, slots = runner.blocks.take(runner.spec.blocks_for(len(tokens))) or [], runner.slots.take(1)
        ours.append(runner.step(runner.batch([tokens], [blocks], slots=slots), ALL).logits.clone())
    assert difference(ours[:1], [theirs]) <= 1e-4
    assert not torch.equal(ours[0][-1], ours[1][-1])


@thorough(MODE, r"\[graph")
@pytest.mark.parametrize("compiler", ["eager", "graph"])
def test_a_name_is_repeated_after_1200_tokens(texts: tuple[list[list[int]], list[list[int]]], compiler: str) -> None:
    """It is not if a state is lost between two chunks, or is that of another sequence."""
    prompts, names = texts
    runner = open_runner(compiler)
    repeated_names.check(runner, prompts, names)
