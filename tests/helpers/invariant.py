"""Random ways to run sequences, whose logits have the same bits with ``numerics.invariant``."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

import hal
from hal.step import ALL
from hal.testing.compared_call import same_bits

TOKENS = 1000
COMPILERS = ("eager", "graph", "piecewise")
SIZES = [1, 4]


@attrs.frozen
class Way:
    """A way to run some sequences.

    Attributes:
        compiler: the compiler.
        threads: the number of threads.
        order: the sequences of the batch.
        chunks: for each sequence, the new tokens of each of its steps.
        late: the number of steps after which each sequence starts.
    """

    compiler: str
    threads: int
    order: Sequence[int]
    chunks: Sequence[Sequence[int]]
    late: Sequence[int]


def texts(seed: int, count: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(5, TOKENS) for _ in range(draw.randint(3, 70))] for _ in range(count)]


def drawn(seed: int, lengths: Sequence[int], compilers: Sequence[str] = COMPILERS) -> Way:
    """Return a random way to run the sequences of these lengths."""
    draw = random.Random(seed)
    order = draw.sample(range(len(lengths)), draw.choice((1, 2, 3, len(lengths))))
    chunks = []
    for each in order:
        most, left, own = draw.choice((1, 2, 7, 16, 64, 512)), lengths[each], list[int]()
        while left:
            own.append(min(left, draw.randint(1, most)))
            left -= own[-1]
        chunks.append(own)
    late = [draw.randint(0, 4) for _ in order]
    return Way(draw.choice(compilers), draw.choice((1, 2)), order, chunks, late)


class Model:
    """A model with a runner for each compiler, and the logits of each sequence alone."""

    def __init__(
        self, path: Path, texts: Sequence[Sequence[int]], compilers: Sequence[str] = COMPILERS, **config: Any
    ) -> None:
        self.texts, self.compilers = texts, compilers
        self.runners = {compiler: self._runner(path, compiler, config) for compiler in compilers}
        self.has_slots = "slots" in {each.name for each in attrs.fields(self.runners["eager"].model.batch_type)}
        wholes = (Way("eager", 2, [row], [[len(text)]], [0]) for row, text in enumerate(texts))
        self.alone = [self.run(way)[0] for way in wholes]

    def _runner(self, path: Path, compiler: str, config: dict[str, Any]) -> hal.Runner:
        prefill = {"prefill": {"capture_sizes": [16]}} if compiler == "piecewise" else {}
        backend = hal.open(
            {
                "backend": "cpu",
                "numerics": {"invariant": True},
                **config,
                "compilation": {"compiler": compiler, "capture_sizes": SIZES, **prefill},
                "cache": {"num_tokens": 16384, **config.get("cache", {})},
            }
        )
        return hal.Runner(hal.load_model(path, backend), backend)

    def run(self, way: Way) -> list[torch.Tensor]:
        """Return the logits of each sequence, ``[tokens, vocab_size]``."""
        runner, threads = self.runners[way.compiler], torch.get_num_threads()
        torch.set_num_threads(way.threads)
        texts = [self.texts[each] for each in way.order]
        blocks = [runner.blocks.take(runner.spec.blocks_for(len(text))) or [] for text in texts]
        slots = runner.slots.take(len(texts)) or [] if self.has_slots else []
        left = [[*each] for each in way.chunks]
        at, late, found = [0] * len(texts), [*way.late], [list[torch.Tensor]() for _ in texts]
        try:
            with torch.inference_mode():
                while any(left):
                    rows = [row for row in range(len(texts)) if left[row] and not late[row]]
                    late = [max(0, each - 1) for each in late]
                    if not rows:
                        continue
                    counts = [left[row].pop(0) for row in rows]
                    tokens = [texts[row][at[row] : at[row] + count] for row, count in zip(rows, counts, strict=True)]
                    fields = {"slots": torch.tensor([slots[row] for row in rows], dtype=torch.int32)} if slots else {}
                    cached = [at[row] for row in rows]
                    batch = runner.batch(tokens, [blocks[row] for row in rows], cached=cached, **fields)
                    logits = runner.step(batch, ALL).logits.clone()
                    for row, part in zip(rows, logits.split(counts), strict=True):
                        found[row].append(part)
                        at[row] += len(part)
        finally:
            torch.set_num_threads(threads)
            for each in blocks:
                runner.blocks.give_back(each)
            if slots:
                runner.slots.give_back(slots)
        return [torch.cat(each) for each in found]

    def check(self, seed: int) -> int:
        """Run sequences in a random way, and compare each with itself alone. Returns the number of sequences."""
        way = drawn(seed, [*map(len, self.texts)], self.compilers)
        for row, logits in zip(way.order, self.run(way), strict=True):
            if not same_bits(logits, self.alone[row]):
                wrong = (logits != self.alone[row]).any(1).nonzero().flatten().tolist()
                apart = (logits.float() - self.alone[row].float()).abs().max()
                raise AssertionError(f"sequence {row}: the tokens {wrong[:20]} differ by up to {apart:.3g}, as {way}")
        return len(way.order)
