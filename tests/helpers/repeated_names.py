"""Texts that ask for a name read 1,200 tokens earlier, which the trained checkpoint with recurrent layers repeats."""

from __future__ import annotations

import modulefinder
from enum import Enum
from pathlib import Path

import hal
from helpers import ROOT

FOLDER = ROOT / "checkpoints" / "tiny-python-hybrid"
DISTANCE = 1200
CHUNK = 8
"""The tokens of the first chunk, which ends inside the name: after the marker and four words."""
MARKER = "\n# name:"
NAMES = (
    " class value return object string method error result",
    " list other first buffer message with count encoding",
)


class Mistake(Enum):
    """What is wrong when the second chunk of a prompt begins."""

    NONE = "none"
    LOST = "the states are zero"
    SWAPPED = "each sequence has the states of the other"


def prompts(checkpoint: hal.Checkpoint) -> tuple[list[list[int]], list[list[int]]]:
    """Return tokens of texts, with a name at the beginning and its marker at the end, and those of the names."""
    tokenizer = checkpoint.tokenizer()
    source = tokenizer.encode(Path(modulefinder.__file__).read_text(encoding="utf-8")).ids
    marker, names = tokenizer.encode(MARKER).ids, [tokenizer.encode(name).ids for name in NAMES]
    pieces = [source[number * DISTANCE :][:DISTANCE] for number in range(len(names))]
    return [[*marker, *name, *piece, *marker] for name, piece in zip(names, pieces, strict=True)], names


def continued(
    runner: hal.Runner, texts: list[list[int]], count: int, mistake: Mistake = Mistake.NONE
) -> list[list[int]]:
    """Prefill the texts in two chunks and return the next tokens of each."""
    blocks = [runner.blocks.take(runner.spec.blocks_for(len(text) + count)) for text in texts]
    used = runner.slots.take(2 * len(texts))
    assert used is not None
    slots = used[: len(texts)]
    runner.step(runner.batch([text[:CHUNK] for text in texts], blocks, slots=slots))
    if mistake is Mistake.LOST:
        slots = used[len(texts) :]
    if mistake is Mistake.SWAPPED:
        slots = slots[::-1]
    new, cached = [text[CHUNK:] for text in texts], [CHUNK for _ in texts]
    made: list[list[int]] = [[] for _ in texts]
    for _ in range(count):
        chosen = runner.step(runner.batch(new, blocks, cached=cached, slots=slots)).logits.argmax(-1).tolist()
        cached = [have + len(part) for have, part in zip(cached, new, strict=True)]
        new = [[token] for token in chosen]
        for each, token in zip(made, chosen, strict=True):
            each.append(token)
    runner.slots.give_back(used)
    for taken in blocks:
        runner.blocks.give_back(taken)
    return made


def check(runner: hal.Runner, texts: list[list[int]], names: list[list[int]]) -> None:
    """Assert that the names are repeated, and that no mistake goes unnoticed in any of the texts."""
    for mistake in Mistake:
        made = continued(runner, texts, len(names[0]), mistake)
        right = [words == name for words, name in zip(made, names, strict=True)]
        assert right == [mistake is Mistake.NONE] * len(names), f"{mistake.value}: {made}"
