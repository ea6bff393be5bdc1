"""Pictures of coloured shapes and digits, and questions about them, for the checkpoint that reads images.

A picture has slots in rows and columns, and a slot holds an object or nothing. All is drawn here, from a seed, so that
training and tests draw the same pictures. Every arrangement whose hash falls to the held-out share is for tests alone.
"""

import hashlib
import random
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

SLOT, CELL, GLYPH = 32, 16, 20  # pixels of a slot, of an embedding, and of an object, which covers parts of four cells
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
GRIDS = tuple((rows, columns) for rows in range(1, 5) for columns in range(1, 5) if 2 <= rows * columns <= 9)
KINDS = ("right", "below", "colour", "count", "list")
EMPTY = 0.2  # the share of empty slots
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


GLYPHS = {shape: glyph(shape) for shape in SHAPES}


@dataclass(frozen=True)
class Thing:
    """An object."""

    colour: str
    shape: str

    def __str__(self) -> str:
        return f"{self.colour} {self.shape}"


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
        return [each for each in self.things if sum(each.shape == other.shape for other in self.things) == 1]

    @property
    def held_out(self) -> bool:
        """Whether it is for tests alone."""
        written = f"{self.rows} {self.columns} {' '.join(map(str, self.slots))}"
        return int.from_bytes(hashlib.sha256(written.encode()).digest()[:8], "big") % HELD_OUT_EVERY == 0

    def at(self, row: int, column: int) -> Thing | None:
        """The object in a slot; None also outside the picture."""
        inside = 0 <= row < self.rows and 0 <= column < self.columns
        return self.slots[row * self.columns + column] if inside else None


def arrange(draw: random.Random, grid: tuple[int, int], *, held_out: bool) -> Arrangement:
    """Draw an arrangement of at least two objects, of which one has a shape of its own."""
    while True:
        slots = tuple(
            None if draw.random() < EMPTY else Thing(draw.choice(list(COLOURS)), draw.choice(SHAPES))
            for _ in range(grid[0] * grid[1])
        )
        found = Arrangement(*grid, slots)
        if len(found.things) >= 2 and found.alone and found.held_out is held_out:
            return found


def paint(draw: random.Random, arrangement: Arrangement) -> Tensor:
    """Return the pixels of a picture, ``[3, height, width]``, uint8."""
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    pixels = torch.full((3, arrangement.rows * SLOT, arrangement.columns * SLOT), draw.uniform(0.75, 1.0))
    for index, thing in enumerate(arrangement.slots):
        if thing is None:
            continue
        top = index // arrangement.columns * SLOT + draw.randrange(CELL - GLYPH // 2 - 1)
        left = index % arrangement.columns * SLOT + draw.randrange(CELL - GLYPH // 2 - 1)
        colour = torch.tensor([each + draw.uniform(-0.08, 0.08) for each in COLOURS[thing.colour]])
        part = pixels[:, top : top + GLYPH, left : left + GLYPH]
        part += GLYPHS[thing.shape] * (colour[:, None, None] - part)
    pixels += torch.randn(pixels.shape, generator=generator) * 0.02
    return (pixels.clamp(0, 1) * 255).round().to(torch.uint8)


def ask(draw: random.Random, arrangement: Arrangement, kind: str) -> tuple[str, str]:
    """Return a question of a kind about a picture, and its answer."""
    things = arrangement.things
    if kind == "list":
        return "list all", " ".join(map(str, things))
    if kind == "count":
        present = dict.fromkeys(each for thing in things for each in (thing.colour, thing.shape))
        what = draw.choice([*present, draw.choice(PLAIN)])
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
    asked = draw.choice(near if near and draw.random() < 0.8 else [*beside])
    return f"what is {where} the {asked}", str(beside[asked] or NOTHING)


@dataclass(frozen=True)
class Question:
    """A picture, and a question about it."""

    pixels: Tensor
    kind: str
    text: str
    answer: str


def held_out_questions(count: int, seed: int = 0) -> list[Question]:
    """Draw questions about pictures of many sizes that training has not seen."""
    draw, found = random.Random(f"held out {seed}"), []
    for index in range(count):
        arrangement = arrange(draw, draw.choice(GRIDS), held_out=True)
        kind = KINDS[index % len(KINDS)]
        found.append(Question(paint(draw, arrangement), kind, *ask(draw, arrangement, kind)))
    return found
