"""Tests of the trained checkpoint that answers questions about pictures: accuracy, and mistakes that must cost it."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from click.testing import CliRunner
from helpers.pictures import CHECKPOINT, RIGHT, answers, drawing, opened, questions, right
from helpers.thorough import EXHAUSTIVE, LONG, MODE, thorough

import hal
from hal.nn import EncoderItem
from hal.quantize.quantize_checkpoint import quantize_checkpoint

FEW, ALL = 25, 300


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint with int8 weights and activations in its text model."""
    path = tmp_path_factory.mktemp("w8a8") / "w8a8"
    quantize_checkpoint(CHECKPOINT, path, "w8a8_dynamic")
    return path


@functools.cache
def answered(mode: str, count: int, path: Path = CHECKPOINT) -> list[str]:
    with opened(mode, path, backend="cpu", dtype="float32") as runner:
        given = answers(runner, questions(count))
        if mode == "graph":
            assert runner.encoding_replays
    return given


def test_answers() -> None:
    assert right(answered("eager", FEW)) >= RIGHT * FEW


@thorough(EXHAUSTIVE)
@pytest.mark.parametrize("mode", ["graph", "piecewise"])
def test_the_same_answers_in_every_mode(mode: str) -> None:
    assert answered(mode, FEW) == answered("eager", FEW)


@thorough(LONG)
def test_int8(quantized: Path) -> None:
    assert right(answered("eager", FEW, quantized)) >= RIGHT * FEW


@thorough(EXHAUSTIVE)
def test_300_pictures(quantized: Path) -> None:
    """As many as transformers answers, which the card says; int8 changes few."""
    card = (CHECKPOINT / "README.md").read_text(encoding="utf-8")
    (theirs,) = re.findall(rf"\| all \| \| (\d+) of {ALL} \|", card)
    for mode in ("eager", "graph", "piecewise"):
        assert right(answered(mode, ALL)) == int(theirs)
        assert abs(right(answered(mode, ALL, quantized)) - int(theirs)) <= 0.02 * ALL


@thorough(MODE)
def test_a_chat_about_a_drawn_picture(tmp_path: Path) -> None:
    """Through the chat template and the image processor, from a file."""
    printed = CliRunner().invoke(drawing().main, [str(tmp_path / "picture.png")], catch_exceptions=False).output
    asked = [line.split(" -> ") for line in printed.splitlines()]
    picture = {"type": "image", "image": str(tmp_path / "picture.png")}
    chats = [[{"role": "user", "content": [picture, {"type": "text", "text": text}]}] for text, _ in asked]
    with hal.LLM(CHECKPOINT, backend="cpu", dtype="float32") as llm:
        found = llm.chat(chats, max_new_tokens=20, temperature=0.0)
    assert [each.text.removesuffix("<stop>").strip() for each in found] == [answer for _, answer in asked]


def transposed(item: EncoderItem) -> EncoderItem:
    """Swap the rows and columns of pixels in each patch."""
    patches = item.values.view(-1, 3, 2, 8, 8).transpose(-1, -2)
    return attrs.evolve(item, values=patches.reshape_as(item.values).contiguous(), digest=b"t" + item.digest)


def reordered(item: EncoderItem) -> EncoderItem:
    """Swap the two middle patches of each embedding, as if the merger read columns first."""
    patches = item.values.view(-1, 4, item.values.shape[1])[:, [0, 2, 1, 3]]
    return attrs.evolve(item, values=patches.reshape_as(item.values).contiguous(), digest=b"r" + item.digest)


def swap_axes(model: Any) -> None:
    """Turn pairs of height by width, and the reverse."""
    axes = model.model.rotary.axes
    axes.copy_(torch.tensor([0, 2, 1])[axes])


def drop_deep(level: int) -> Any:
    """Return what removes a row of DeepStack."""

    def drop(model: Any) -> None:
        merger = model.visual.deepstack_merger_list[level]
        for each in merger.linear_fc2.parameters():
            each.zero_()

    return drop


MISTAKES: dict[str, tuple[Any, Any]] = {
    "height and width swapped in the positions of the text model": (swap_axes, None),
    "the first row of DeepStack dropped": (drop_deep(0), None),
    "the second row of DeepStack dropped": (drop_deep(1), None),
    "the merger's middle patches swapped": (None, reordered),
    "the pixels of each patch transposed": (None, transposed),
}
"""Changes of the model and of each picture's item, by their names on the card."""


def right_with(mistake: str, count: int) -> int:
    """Return how many of the first ``count`` questions are answered right with a mistake."""
    of_model, of_item = MISTAKES[mistake]
    with opened("eager", backend="cpu", dtype="float32") as runner, torch.inference_mode():
        if of_model is not None:
            of_model(runner.model)
        return right(answers(runner, questions(count), change=of_item or (lambda item: item)))


@thorough(EXHAUSTIVE)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_card_says_what_a_mistake_costs(mistake: str) -> None:
    card = (CHECKPOINT / "README.md").read_text(encoding="utf-8")
    (told,) = re.findall(rf"\| {mistake} \| (\d+) \|", card)
    assert abs(right_with(mistake, 100) - int(told)) <= 2
