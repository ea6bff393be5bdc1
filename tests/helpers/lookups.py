"""Texts that ask for what was defined 2,000 tokens earlier, which the trained checkpoint with an index looks up.

The index selects 64 tokens; no wrong selection gives an answer.
"""

from __future__ import annotations

import modulefinder
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

import hal
from hal import ops
from hal.ops.selection import places_of
from helpers import ROOT

FOLDER = ROOT / "checkpoints" / "tiny-python-latent"
BEFORE, DISTANCE = 200, 2000
"""The tokens of source text before the definitions, and between the last of them and the first question."""
MARKER = "\n#:"
RECORDS = (
    " leading active enumerate globals memory",
    " supports handlers spaces later year",
    " really complete collections params every",
    " trailing means reading side false",
    " corresponding shutdown debugger week ctypes",
    " exactly control interpreter sent let",
    " children words family equal within",
    " constructor stdin diff many show",
)
"""A name and its value, words of one token each. The source text has none of them."""
RIGHT, WRONG = 0.85, 0.15
"""The least share of answers with the selection as it is, and the largest with a wrong one."""


class Selection(Enum):
    """The positions that tokens attend to."""

    BEST = "the highest scores"
    WORST = "the lowest scores"
    LAST = "the last positions"
    SHIFTED = "the positions before those of the highest scores"


@attrs.frozen
class Text:
    """Tokens of a text with definitions, of the questions after it, and of the answers."""

    text: list[int]
    questions: list[list[int]]
    answers: list[list[int]]

    @classmethod
    def of(cls, checkpoint: hal.Checkpoint) -> Text:
        """Return the text in the checkpoint's tokens. The questions are in another order than the definitions."""
        tokenizer = checkpoint.tokenizer()
        marker = tokenizer.encode(MARKER).ids
        source = tokenizer.encode(Path(modulefinder.__file__).read_text(encoding="utf-8")).ids
        records = [tokenizer.encode(each).ids for each in RECORDS]
        definitions = [token for record in records for token in (*marker, *record)]
        text = [*source[:BEFORE], *definitions, *source[BEFORE:][:DISTANCE]]
        asked = records[1::2] + records[::2]
        return cls(text, [[*marker, name] for name, *_ in asked], [value for _, *value in asked])


def answered(runner: hal.Runner, asked: Text, chunk: int | None = None) -> list[list[int]]:
    """Return the greedy answers to the questions, each after the text, the earlier questions and their answers.

    Args:
        runner: A runner with room for one sequence.
        asked: The text.
        chunk: The most tokens of a step; all by default.
    """
    size = len(asked.text) + sum(map(len, asked.questions + asked.answers))
    blocks = runner.blocks.take(runner.spec.blocks_for(size))
    assert blocks is not None
    cached, token = 0, 0

    def read(tokens: Sequence[int]) -> int:
        nonlocal cached, token
        for start in range(0, len(tokens), chunk or len(tokens)):
            part = list(tokens[start:][: chunk or len(tokens)])
            token = int(runner.step(runner.batch([part], [blocks], cached=[cached])).logits.argmax(-1))
            cached += len(part)
        return token

    read(asked.text)
    made = []
    for question, answer in zip(asked.questions, asked.answers, strict=True):
        made.append([read(question)])
        made[-1].extend(read([token]) for _ in answer[1:])
        read([token])
    runner.blocks.give_back(blocks)
    return made


def share(made: list[list[int]], asked: Text) -> float:
    """Return the share of right answers."""
    return sum(one == other for one, other in zip(made, asked.answers, strict=True)) / len(made)


@contextmanager
def selecting(selection: Selection) -> Iterator[None]:
    """Change what ``select_keys`` selects inside the block, in steps that run the model's Python."""

    def wrap(operation: ops.Operation, kernel: Callable[..., Any]) -> Callable[..., Any]:
        if operation.name != "select_keys":
            return kernel

        def select(query: Tensor, weights: Tensor, cache: Tensor, *places: Any) -> Tensor:
            if selection is Selection.WORST:
                weights = -weights
            found: Tensor = kernel(query, weights, cache, *places)
            if selection is Selection.LAST:
                _, starts, lens, budget, _ = places
                _, position = places_of(len(query), starts, lens)
                first = (position[:, None] + 1 - budget).clamp(min=0)
                last = first + torch.arange(budget)
                return torch.where(last <= position[:, None], last, -1).int()
            return torch.where(found > 0, found - 1, found) if selection is Selection.SHIFTED else found

        return select

    with ops.intercepted(wrap):
        yield
