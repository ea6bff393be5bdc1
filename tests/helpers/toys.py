"""Checkpoints of the toy models, and a schedule of batches that mix, grow, shrink and permute."""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors.torch import save_file
from torch import Tensor

import hal
from hal.checkpoint.model_registry import find_model
from hal.checkpoint.weight_bindings import bindings_of
from hal.ops import Operation
from hal.step import ALL, SEQUENCE
from helpers import TESTS

PACKAGE = TESTS / "project" / "outside"

COMMON = {"vocab_size": 61, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 3}
PATCH = 12
SPLIT_AT: Mapping[str, Sequence[str]] = {
    "ExpertsForCausalLM": ("paged_attention",),
    "LatentForCausalLM": ("toy_latent_attention",),
    "RecurrentForCausalLM": ("paged_attention", "causal_conv", "linear_attention"),
    "PicturesForCausalLM": ("paged_attention",),
}
"""Splitting operations, by model."""
SLOTS = 3
OPERATIONS: dict[str, Operation] = {}
"""Those that the package has declared, while it is not installed."""


@contextmanager
def installed() -> Iterator[None]:
    """Make the package importable with its metadata, as if it were installed."""
    sys.path.insert(0, str(PACKAGE))
    try:
        yield
    finally:
        sys.path.remove(str(PACKAGE))


def checkpoint(folder: Path, architecture: str, *, seed: int = 0) -> Path:
    """Write a checkpoint of random weights, with the names that the model binds."""
    return write(folder, {"architectures": [architecture], "torch_dtype": "float32", **COMMON}, seed=seed)


def write(folder: Path, config: Mapping[str, Any], *, seed: int = 0) -> Path:
    """Write a checkpoint of random weights with a config.json."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with torch.device("meta"):
        model = find_model(config["architectures"][0]).from_config(config)
    generator = torch.Generator().manual_seed(seed)
    shapes = {piece.source: piece.source_shape for binding in bindings_of(model) for piece in binding.pieces()}
    tensors = {
        name: torch.randn(shape, generator=generator) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.1)
        + (len(shape) == 1)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


@attrs.frozen
class Schedule:
    """Sequences that start, grow, pause and end; and the new tokens of each step.

    Attributes:
        texts: the tokens of each sequence.
        steps: in order; each has pairs of a sequence and its number of new tokens, by row of the batch.
    """

    texts: tuple[tuple[int, ...], ...]
    steps: tuple[tuple[tuple[int, int], ...], ...]

    @classmethod
    def drawn(cls, seed: int, vocab_size: int, *, count: int = 9, together: int = SLOTS) -> Schedule:
        """Draw a schedule. At most ``together`` sequences run at a time, so that slots and blocks are reused."""
        draw = random.Random(seed)
        texts = tuple(tuple(draw.randrange(vocab_size) for _ in range(draw.randint(8, 24))) for _ in range(count))
        waiting, running = list(range(count)), dict[int, int]()
        steps = []
        while waiting or running:
            while waiting and len(running) < together:
                running[waiting.pop(0)] = 0
            rows = [each for each in running if draw.random() < 0.8] or list(running)
            draw.shuffle(rows)
            step = []
            for row in rows:
                left = len(texts[row]) - running[row]
                wanted = draw.randint(1, 9) if running[row] == 0 else draw.choice((1, 1, 1, 1, 4))
                step.append((row, min(left, wanted)))
            steps.append(tuple(step))
            for row, new in step:
                running[row] += new
                if running[row] == len(texts[row]):
                    del running[row]
        return cls(texts, tuple(steps))

    @property
    def mixed(self) -> int:
        """Return the number of steps in which some sequences have one new token and others more."""
        return sum(len({new == 1 for _, new in step}) == 2 for step in self.steps)


def fields_of(architecture: str, rows: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
    """Return the additional fields of a model's batch, for each sequence's tokens from a start to an end."""
    if architecture != "PicturesForCausalLM":
        return {}
    places = torch.tensor([at for _, start, end in rows for at in range(start, end)])
    seeds = torch.tensor([row for row, start, end in rows for _ in range(start, end)])
    positions = torch.stack([places, places // 2 + seeds, places % 5])
    pictures = torch.sin(torch.arange(1, PATCH + 1) * (seeds * 7 + places * 3 + 1)[:, None].float())
    return {"rows_of_positions": positions, "image_embeddings": pictures, "is_image": (places % 4 == 1)}


def alone(runner: hal.Runner, schedule: Schedule, architecture: str) -> list[Tensor]:
    """Return the logits of each text at every token, run alone in one step."""
    found = []
    for row, text in enumerate(schedule.texts):
        blocks = runner.blocks.take(runner.spec.blocks_for(len(text))) or []
        slots = runner.slots.take(1) if runner.slots.needed else None
        batch = runner.batch(
            [text], [blocks], **({"slots": slots} if slots else {}), **fields_of(architecture, [(row, 0, len(text))])
        )
        found.append(runner.step(batch, ALL).logits.float().cpu())
        runner.blocks.give_back(blocks)
        runner.slots.give_back(slots or ())
    return found


def scheduled(runner: hal.Runner, schedule: Schedule, architecture: str) -> Iterator[tuple[int, int, Tensor]]:
    """Run the schedule; yield, for each step and sequence, its number, the number of tokens so far, and the logits."""
    done = dict.fromkeys(range(len(schedule.texts)), 0)
    blocks: dict[int, list[int]] = {}
    slots: dict[int, list[int]] = {}
    for step in schedule.steps:
        for row, _ in step:
            if row not in blocks:
                blocks[row] = runner.blocks.take(runner.spec.blocks_for(len(schedule.texts[row]))) or []
                slots[row] = (runner.slots.take(1) or []) if runner.slots.needed else []
        rows = [(row, done[row], done[row] + new) for row, new in step]
        in_slots = {"slots": [slot for row, _ in step for slot in slots[row]]} if runner.slots.needed else {}
        batch = runner.batch(
            [schedule.texts[row][start:end] for row, start, end in rows],
            [blocks[row] for row, _ in step],
            cached=[start for _, start, _ in rows],
            **in_slots,
            **fields_of(architecture, rows),
        )
        logits = runner.step(batch).logits.float().cpu()
        for (row, _, end), each in zip(rows, logits, strict=True):
            done[row] = end
            yield row, end, each
            if end == len(schedule.texts[row]):
                runner.blocks.give_back(blocks.pop(row))
                poison(runner, slots[row])
                runner.slots.give_back(slots.pop(row))


def poison_of(state: Tensor) -> float:
    """Return a value that makes results wrong if it is read: NaN, or a number of no token."""
    return math.nan if state.is_floating_point() else -1


def poison(runner: hal.Runner, slots: Sequence[int]) -> None:
    """Fill the states of sequences that ended with NaN. A later sequence must not read them."""
    with torch.inference_mode():
        for index, name, state in runner.spec.states():
            if state.per is SEQUENCE:
                found = runner.states.layers[index][name]
                found[list(slots)] = poison_of(found)


def check(runner: hal.Runner, schedule: Schedule, expected: Sequence[Tensor], architecture: str, slack: float) -> int:
    """Run the schedule twice, so that each run meets the other's state; compare tokens and logits with ``expected``.

    Returns:
        The number of tokens that were compared.

    Raises:
        AssertionError: logits differ by more than ``slack`` of the largest, or a token where no tie explains it.
    """
    compared = 0
    for _ in range(2):
        for row, end, logits in scheduled(runner, schedule, architecture):
            wanted = expected[row][end - 1]
            allowed = slack * wanted.abs().max()
            assert not logits.isnan().any(), (row, end)
            assert (logits - wanted).abs().max() <= allowed, (row, end, (logits - wanted).abs().max(), allowed)
            best = wanted.topk(2).values
            if best[0] - best[1] > 2 * allowed:
                assert int(logits.argmax()) == int(wanted.argmax()), (row, end)
            compared += 1
    return compared
