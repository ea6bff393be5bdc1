"""Questions about pictures, and a model's answers to them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

import hal
from hal.generation.llm.processor import open_processor, prompt_with
from hal.nn import EncoderItem
from helpers import TESTS

Image = pytest.importorskip("PIL.Image", reason="hal reads images with pillow, of the extra vision")

CHECKPOINT = TESTS.parent / "checkpoints" / "tiny-pictures"
RIGHT = 0.9
"""The least share of right answers."""
Change = Callable[[EncoderItem], EncoderItem]


def drawing() -> Any:
    """Return the module that draws the pictures of training."""
    name = "hal_pictures"
    if name not in sys.modules:
        spec = spec_from_file_location(name, TESTS.parent / "tools" / "checkpoints" / "pictures.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@functools.cache
def questions(count: int) -> Sequence[Any]:
    """Return questions about pictures of many sizes that training has not seen."""
    found: Sequence[Any] = drawing().held_out_questions(count)
    return found


def answers(
    runner: hal.Runner, asked: Sequence[Any], path: Path = CHECKPOINT, change: Change = lambda item: item
) -> list[str]:
    """Return the model's answers.

    Args:
        runner: runs the model.
        asked: the questions.
        path: the checkpoint.
        change: changes each picture's item, such as the order of its patches.
    """
    opened = hal.Checkpoint.open(path)
    preparation, tokenizer = open_processor(opened), opened.tokenizer()
    prompts, items = [], []
    for each in asked:
        picture = Image.fromarray(each.pixels.permute(1, 2, 0).numpy())
        text = f"user <start> <image> <end> {each.text} assistant"
        tokens, own = prompt_with(runner.model, preparation, tokenizer.encode(text).ids, [picture])
        prompts.append(tokens)
        items.append([change(item) for item in own])
    stop = tokenizer.token_to_id("<stop>")
    found: list[list[int]] = [[] for _ in asked]
    params = hal.SamplingParams(max_new_tokens=20, temperature=0.0, stop_token_ids={stop})
    for token in hal.generate(runner, prompts, params, items=items):
        if token.token_id != stop:
            found[token.prompt_index].append(token.token_id)
    return [tokenizer.decode(each, skip_special_tokens=False) for each in found]


def right(given: Sequence[str]) -> int:
    """Return how many of the answers to the first questions are right, word for word."""
    return sum(each.answer == answer for each, answer in zip(questions(len(given)), given, strict=True))


MODES: dict[str, dict[str, Any]] = {
    "eager": {"compiler": "eager"},
    "graph": {
        "compiler": "graph",
        "capture_sizes": [64],
        "encoder": {"compiler": "graph", "capture_sizes": [64, 1024]},
    },
    "piecewise": {"compiler": "piecewise", "capture_sizes": [64], "prefill": {"capture_sizes": [256]}},
}
"""Compilations by name."""


def opened(mode: str, path: Path = CHECKPOINT, **config: Any) -> hal.Runner:
    """Return a runner of the checkpoint."""
    cache = {"num_tokens": 2048, "block_size": 16} if config["backend"] == "cpu" else {"num_tokens": 4096}
    backend = hal.open({"compilation": MODES[mode], "cache": cache, **config})
    return hal.Runner(hal.load_model(path, backend), backend, max_sequences=64)
