"""Pictures and conversations about them as tensors, for the training of the checkpoint that reads images.

Worker processes choose the objects and the questions. The device paints, in `pictures.Painter`. All batches have
the same shapes: pictures are padded to the most slots, and conversations to LENGTH.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from pictures import (
    CELL,
    COLOURS,
    COUNTS,
    GRIDS,
    NOTHING,
    SHAPES,
    SLOT,
    SLOTS,
    Arrangement,
    arrange,
    ask,
)
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

PATCH, MERGE, FRAMES = 8, 2, 2
SIDE = SLOT // CELL  # cells of a slot in each direction
CELLS = SLOTS * SIDE**2
PATCHES = CELLS * MERGE**2
STOP, IMAGE, VIDEO, START, END = "<stop>", "<image>", "<video>", "<start>", "<end>"
WORDS = [
    *(STOP, IMAGE, VIDEO, START, END, "<unknown>", "user", "assistant"),
    *("list", "all", "count", "the", "what", "colour", "is", "right", "of", "below", NOTHING),
    *COLOURS,
    *SHAPES,
    *COUNTS,
]
KNOWN = {word: index for index, word in enumerate(WORDS)}
TURNS = (*["right", "below"] * 2, *["colour", "count"] * 3, "list")
ASKED = 8  # how many of TURNS are asked about a picture
LENGTH = 136  # at least the words of the longest conversation
CONNECTED = 0.3  # share of the conversations whose questions see the ones before; otherwise they see only the picture


def grid_of(rows: int, columns: int) -> list[int]:
    """A picture's frames, and its patches down and across."""
    return [1, rows * SLOT // PATCH, columns * SLOT // PATCH]


def head_of(grid: list[int]) -> list[str]:
    """The words of a prompt before the question."""
    return ["user", START, *[IMAGE] * (grid[1] * grid[2] // MERGE**2), END]


def conversation(draw: random.Random, arrangement: Arrangement) -> dict[str, list[int]]:
    """Questions about a picture with their answers.

    Returns:
        For each word its number, its position without those within the picture, its part (0 is what all words may see,
        and any other number what only the same part sees), and the word to be learned after it, or -100.
    """
    grid = grid_of(arrangement.rows, arrangement.columns)
    ids = [KNOWN[each] for each in head_of(grid)]
    after = 2 + max(grid[1:]) // MERGE
    positions = [0, 1, *[2] * (len(ids) - 3), after]
    parts, targets = [0] * len(ids), [-100] * len(ids)
    connected = draw.random() < CONNECTED
    for number, kind in enumerate(draw.sample(TURNS, ASKED)):
        question, answer = ask(draw, arrangement, kind)
        again = ["user"] if connected and number else []
        prompt = [KNOWN[each] for each in (*again, *question.split(), "assistant")]
        told = [KNOWN[each] for each in (*answer.split(), STOP)]
        first = positions[-1] + 1 if connected else after + 1
        ids += prompt + told
        positions += range(first, first + len(prompt) + len(told))
        parts += [0 if connected else number + 1] * (len(prompt) + len(told))
        targets += [-100] * (len(prompt) - 1) + told + [-100]
    return {"ids": ids, "positions": positions, "parts": parts, "targets": targets}


class Conversations(Dataset[dict[str, Tensor]]):
    """Batches of pictures and conversations by number; a number always gives the same batch."""

    def __init__(self, batch: int, seed: int) -> None:
        self.batch = batch
        self.seed = seed

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draw = random.Random(f"{self.seed} {index}")
        rows: dict[str, list[Any]] = {name: [] for name in ("grid", "numbers", "ids", "positions", "parts", "targets")}
        fill = {"ids": 0, "positions": 0, "parts": -1, "targets": -100}
        for _ in range(self.batch):
            grid = draw.randrange(len(GRIDS))
            arrangement = arrange(draw, GRIDS[grid], held_out=False)
            rows["grid"].append(grid)
            rows["numbers"].append(arrangement.numbers)
            for name, values in conversation(draw, arrangement).items():
                rows[name].append(values + [fill[name]] * (LENGTH - len(values)))
        return {name: torch.tensor(values, dtype=torch.int16) for name, values in rows.items()}


def batches(batch: int, seed: int, workers: int, pinned: bool) -> DataLoader[dict[str, Tensor]]:
    """Return an endless supply of batches, drawn ahead by worker processes."""
    ahead = {"prefetch_factor": 8} if workers else {}
    return DataLoader(Conversations(batch, seed), batch_size=None, num_workers=workers, pin_memory=pinned, **ahead)


def cell_order() -> Tensor:
    """For each of GRIDS, the places of a picture's cells among those of its slots, ``[len(GRIDS), CELLS]``; -1 pads."""
    order = torch.full((len(GRIDS), CELLS), -1)
    for number, (rows, columns) in enumerate(GRIDS):
        places = torch.arange(rows * columns * SIDE**2).view(rows, columns, SIDE, SIDE)
        order[number, : places.numel()] = places.transpose(1, 2).flatten()  # cells row after row of the picture
    return order


def patches_of(pixels: Tensor, order: Tensor) -> Tensor:
    """The patches of pictures as transformers' processor gives them, without its resizing, which changes nothing.

    Args:
        pixels: slots' pixels from 0 to 255, ``[pictures, SLOTS, 3, SLOT, SLOT]``.
        order: a row of `cell_order` for each picture, without negative places.
    """
    values = (pixels / 255 - 0.5) / 0.5
    blocks = values.view(-1, SLOTS, 3, SIDE, MERGE, PATCH, SIDE, MERGE, PATCH)
    # cells of a slot, patches of a cell, channel, row, column
    cells = blocks.permute(0, 1, 3, 6, 4, 7, 2, 5, 8).reshape(-1, CELLS, MERGE**2 * 3 * PATCH**2)
    ordered = cells.gather(1, order[..., None].expand_as(cells)).view(-1, PATCHES, 3, 1, PATCH, PATCH)
    return ordered.expand(-1, -1, -1, FRAMES, -1, -1).flatten(2)


def cell_labels(numbers: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """The colour and the shape in each cell of pictures; the number after the last for none, -100 where order pads.

    An object belongs to the first cell of its slot.
    """
    empty = numbers == len(COLOURS) * len(SHAPES)
    found = []
    for label, none in ((numbers // len(SHAPES), len(COLOURS)), (numbers % len(SHAPES), len(SHAPES))):
        cells = torch.full((*numbers.shape, SIDE**2), none, device=numbers.device)
        cells[..., 0] = torch.where(empty, none, label)
        found.append(cells.flatten(1).gather(1, order.clamp(min=0)).where(order >= 0, -100))
    return found[0], found[1]
