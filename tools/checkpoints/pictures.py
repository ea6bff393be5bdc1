"""Pictures of coloured shapes and digits, and questions about them, for the checkpoint that reads images.

A picture has slots in rows and columns, and a slot holds an object or nothing. All is drawn here, from a seed, so that
training and tests draw the same pictures. Every arrangement whose hash falls to the held-out share is for tests alone.

    python tools/checkpoints/pictures.py picture.png   # draws a picture unseen in training, and prints questions
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import torch
from torch import Tensor
from torch.nn import functional

SLOT, CELL, GLYPH = 32, 16, 20  # pixels of a slot, of an embedding, and of an object, which covers parts of four cells
SHIFTS = 5  # how many pixels of a slot an object may begin at, down and across
COLOURS: dict[str, tuple[float, float, float]] = {
    "red": (0.85, 0.1, 0.1),
    "green": (0.1, 0.6, 0.15),
    "blue": (0.1, 0.2, 0.85),
    "black": (0.1, 0.1, 0.1),
}
DIGITS = """
01110 00100 01110 11111 00010 11111 00110 11111 01110 01110
10001 01100 10001 00010 00110 10000 01000 00001 10001 10001
10011 00100 00001 00100 01010 11110 10000 00010 10001 10001
10101 00100 00010 00010 10010 00001 11110 00100 01110 01111
11001 00100 00100 00001 11111 00001 10001 01000 10001 00001
10001 00100 01000 10001 00010 10001 10001 01000 10001 00010
01110 01110 11111 01110 00010 01110 01110 01000 01110 01100
"""
PLAIN = ("circle", "square", "triangle", "cross")
SHAPES = (*PLAIN, *"0123456789")
COUNTS = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
NOTHING = "nothing"
SLOTS = 9  # the most slots of a picture
GRIDS = tuple((rows, columns) for rows in range(1, 5) for columns in range(1, 5) if 2 <= rows * columns <= SLOTS)
KINDS = ("right", "below", "colour", "count", "list")
EMPTY = 0.2  # the share of empty slots
BESIDE = 0.85  # the share of questions about a neighbour that certainly have one, where a picture has two
HELD_OUT_EVERY = 10


def glyph(shape: str) -> Tensor:
    """The share of each pixel that an object covers, ``[GLYPH, GLYPH]``."""
    fine = 4 * GLYPH
    across = torch.linspace(-1, 1, fine)
    y, x = torch.meshgrid(across, across, indexing="ij")
    if shape == "circle":
        mask = x**2 + y**2 <= 1
    elif shape == "square":
        mask = (x.abs() <= 0.85) & (y.abs() <= 0.85)
    elif shape == "triangle":
        mask = x.abs() <= (y + 1) / 2
    elif shape == "cross":
        mask = (x.abs() <= 0.3) | (y.abs() <= 0.3)
    else:
        lines = [line.split()[int(shape)] for line in DIGITS.split("\n") if line]
        bits = torch.tensor([[float(each) for each in line] for line in lines])
        narrow = fine * 5 // 7
        drawn = functional.interpolate(bits[None, None], size=(fine, narrow), mode="nearest")
        left = (fine - narrow) // 2
        mask = functional.pad(drawn, (left, fine - narrow - left))[0, 0] > 0
    return functional.avg_pool2d(mask.float()[None], 4)[0]


@dataclass(frozen=True)
class Thing:
    """An object."""

    colour: str
    shape: str

    def __str__(self) -> str:
        return f"{self.colour} {self.shape}"


THINGS = tuple(Thing(colour, shape) for colour in COLOURS for shape in SHAPES)
NUMBERS: dict[Thing | None, int] = {**{thing: number for number, thing in enumerate(THINGS)}, None: len(THINGS)}
"""Number of an object; the last one is for an empty slot."""


@dataclass(frozen=True)
class Arrangement:
    """What is in each slot, row after row."""

    rows: int
    columns: int
    slots: tuple[Thing | None, ...]

    @property
    def things(self) -> list[Thing]:
        """The objects in reading order."""
        return [each for each in self.slots if each is not None]

    @property
    def alone(self) -> list[Thing]:
        """The objects whose shape no other object has."""
        shapes = [each.shape for each in self.things]
        return [each for each in self.things if shapes.count(each.shape) == 1]

    @property
    def numbers(self) -> list[int]:
        """The objects' numbers, with empty slots up to the most."""
        return [NUMBERS[each] for each in self.slots] + [len(THINGS)] * (SLOTS - len(self.slots))

    @property
    def held_out(self) -> bool:
        """Whether it is for tests alone."""
        written = f"{self.rows} {self.columns} {self.numbers}"
        return int.from_bytes(hashlib.sha256(written.encode()).digest()[:8], "big") % HELD_OUT_EVERY == 0

    def at(self, row: int, column: int) -> Thing | None:
        """The object in a slot; None also outside the picture."""
        inside = 0 <= row < self.rows and 0 <= column < self.columns
        return self.slots[row * self.columns + column] if inside else None


def arrange(draw: random.Random, grid: tuple[int, int], *, held_out: bool) -> Arrangement:
    """Draw an arrangement of at least two objects. One of them has a shape that no other has."""
    while True:
        slots = tuple(None if draw.random() < EMPTY else draw.choice(THINGS) for _ in range(grid[0] * grid[1]))
        found = Arrangement(*grid, slots)
        if len(found.things) >= 2 and found.alone and found.held_out is held_out:
            return found


class Painter:
    """Paints the slots of many pictures at once, on any device."""

    def __init__(self, device: torch.device | str = "cpu", seed: int = 0) -> None:
        self.generator = torch.Generator(device).manual_seed(seed)
        shapes = torch.stack([glyph(shape) for shape in SHAPES])
        around = (SHIFTS - 1, SLOT - GLYPH) * 2
        per_thing = functional.pad(shapes, around).repeat(len(COLOURS), 1, 1)
        self.masks = functional.pad(per_thing, (0, 0, 0, 0, 0, 1)).to(device)  # nothing covers nothing
        colours = torch.tensor([COLOURS[each.colour] for each in THINGS] + [(0.0, 0.0, 0.0)])
        self.colours = colours.to(device)

    def _uniform(self, low: float, high: float, *shape: int) -> Tensor:
        drawn = torch.rand(shape, generator=self.generator, device=self.generator.device)
        return low + (high - low) * drawn

    def __call__(self, numbers: Tensor) -> Tensor:
        """Return the pixels of slots, ``[pictures, slots, 3, SLOT, SLOT]``, from 0 to 255, of things by number."""
        pictures, slots = numbers.shape
        shift = self._uniform(0, SHIFTS, 2, pictures, slots).long()
        down, across = torch.arange(SLOT, device=numbers.device) - shift[..., None] + SHIFTS - 1
        mask = self.masks[numbers[..., None, None], down[..., :, None], across[..., None, :]][:, :, None]
        ground = self._uniform(0.75, 1.0, pictures, 1, 1, 1, 1)
        colours = self.colours[numbers] + self._uniform(-0.08, 0.08, pictures, slots, 3)
        pixels = ground + mask * (colours[..., None, None] - ground)
        noise = torch.randn(pixels.shape, generator=self.generator, device=numbers.device)
        return ((pixels + 0.02 * noise).clamp(0, 1) * 255).round()


def ask(draw: random.Random, arrangement: Arrangement, kind: str) -> tuple[str, str]:
    """Return a question of a kind about a picture, and its answer."""
    things = arrangement.things
    if kind == "list":
        return "list all", " ".join(map(str, things))
    if kind == "count":
        present = [each for thing in things for each in (thing.colour, thing.shape)]
        what = draw.choice([*present, *draw.sample(SHAPES, 2)])
        return f"count the {what}", COUNTS[sum(what in (each.colour, each.shape) for each in things)]
    if kind == "colour":
        asked = draw.choice(arrangement.alone)
        return f"what colour is the {asked.shape}", asked.colour
    down, across, where = (0, 1, "right of") if kind == "right" else (1, 0, "below")
    beside = {}
    for index, thing in enumerate(arrangement.slots):
        if thing is not None and things.count(thing) == 1:
            beside[thing] = arrangement.at(index // arrangement.columns + down, index % arrangement.columns + across)
    near = [thing for thing, other in beside.items() if other is not None]
    asked = draw.choice(near if near and draw.random() < BESIDE else [*beside])
    return f"what is {where} the {asked}", str(beside[asked] or NOTHING)


@dataclass(frozen=True)
class Question:
    """A picture, and a question about it."""

    pixels: Tensor  # [3, height, width], uint8
    kind: str
    text: str
    answer: str


def pixels_of(slots: Tensor, rows: int, columns: int) -> Tensor:
    """Return a picture, ``[3, height, width]``, uint8, of its painted slots."""
    used = slots[: rows * columns].to(torch.uint8).view(rows, columns, 3, SLOT, SLOT)
    return used.permute(2, 0, 3, 1, 4).reshape(3, rows * SLOT, columns * SLOT)


def held_out_questions(count: int, seed: int = 0) -> Sequence[Question]:
    """Draw questions about pictures of many sizes that training has not seen."""
    draw, painter, found = random.Random(f"held out {seed}"), Painter(seed=seed), list[Question]()
    for index in range(count):
        kind = KINDS[index % len(KINDS)]
        rows, columns = draw.choice(GRIDS)
        while (columns if kind == "right" else rows if kind == "below" else 2) == 1:
            rows, columns = draw.choice(GRIDS)
        arrangement = arrange(draw, (rows, columns), held_out=True)
        pixels = pixels_of(painter(torch.tensor([arrangement.numbers]))[0], rows, columns)
        found.append(Question(pixels, kind, *ask(draw, arrangement, kind)))
    return found


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--seed", type=int, default=0, show_default=True)
def main(path: Path, seed: int) -> None:
    """Draw a picture that training has not seen, and print questions and answers."""
    from PIL import Image

    draw = random.Random(f"picture {seed}")
    arrangement = arrange(draw, (3, 3), held_out=True)
    pixels = pixels_of(Painter(seed=seed)(torch.tensor([arrangement.numbers]))[0], 3, 3)
    Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(path)
    for kind in KINDS:
        click.echo(" -> ".join(ask(draw, arrangement, kind)))


if __name__ == "__main__":
    main()
