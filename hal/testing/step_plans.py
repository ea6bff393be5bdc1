"""Plans: sequences of steps as a serving engine would run them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import lru_cache

import attrs
import torch
from torch import Tensor

from hal.checkpoint.loading import load_model
from hal.drivers.backend import active_backend
from hal.execution.runner import Runner
from hal.ops.rounding import ReferenceLogits
from hal.step import ALL, LAST
from hal.step.fields import DUMMY_BLOCK
from hal.testing.random_checkpoint import checkpoint
from hal.testing.target import reference_backend

SPARE = 3
"""Blocks that belong to no sequence; no step may write them."""
Texts = tuple[tuple[int, ...], ...]
BLOCK = 64


@attrs.frozen
class Plan:
    """Sequences and the steps that extend them.

    Attributes:
        lengths: number of prompt tokens per sequence.
        decodes: sequences in each step after the first, in batch order.
        seed: seed of the tokens and of the block allocation.
        queries: new tokens per running sequence and step; if more than one, the logits of all of them are requested.
        first: sequences whose prompts are in the first step; None for all. The other prompts are in the first of
            ``decodes`` that contains their sequence, next to running sequences.
        shared: length of the common prefix of all prompts, in tokens; a whole number of blocks, which all sequences
            share. A step before the first one computes it.
    """

    lengths: tuple[int, ...]
    decodes: tuple[tuple[int, ...], ...]
    seed: int = 0
    queries: int = 1
    first: tuple[int, ...] | None = None
    shared: int = 0

    @property
    def steps(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Return, for each step, pairs of sequence and its number of tokens after the step."""
        began = tuple(range(len(self.lengths))) if self.first is None else self.first
        at = dict.fromkeys(range(len(self.lengths)), 0)
        found = []
        for rows in (began, *self.decodes):
            for row in rows:
                at[row] += self.queries if at[row] else self.lengths[row]
            found.append(tuple((row, at[row]) for row in rows))
        return tuple(found)

    def texts(self, vocab_size: int) -> Texts:
        """Return all tokens of each sequence: prompt and decode steps."""
        draw = random.Random(self.seed)
        ends = {row: end for step in self.steps for row, end in step}
        texts = [tuple(draw.randrange(vocab_size) for _ in range(ends[row])) for row in range(len(self.lengths))]
        return tuple(texts[0][: self.shared] + text[self.shared :] for text in texts)

    def blocks(self, texts: Texts, block_size: int) -> list[list[int]]:
        """Return the blocks of each sequence, scattered over the cache."""
        common = self.shared // block_size
        needed = [math.ceil(len(text) / block_size) - common for text in texts]
        free = list(range(DUMMY_BLOCK + 1, DUMMY_BLOCK + 1 + common + sum(needed) + SPARE))
        random.Random(self.seed).shuffle(free)
        prefix = [free.pop() for _ in range(common)]
        return [prefix + [free.pop() for _ in range(count)] for count in needed]


def run_plan(runner: Runner, plan: Plan) -> dict[tuple[int, int], Tensor]:
    """Run a plan on a cache filled with NaN, which no step may read before it is written.

    Returns:
        The logits ``[vocab_size]`` after each token, on the CPU, by sequence and token position.

    Raises:
        AssertionError: a step wrote a slot that holds none of its tokens.
    """
    canonical = runner.backend.state_layout == "canonical"
    if canonical:
        with torch.inference_mode():
            for _, state in runner.states.tensors():
                state.fill_(math.nan)
    size = runner.spec.block_size
    texts = plan.texts(runner.model.vocab_size)
    blocks = plan.blocks(texts, size)
    if plan.shared:
        runner.step(runner.batch([texts[0][: plan.shared]], [blocks[0]]))
    done = dict.fromkeys(range(len(texts)), plan.shared)
    found: dict[tuple[int, int], Tensor] = {}
    for index, step in enumerate(plan.steps):
        several = index > 0 and plan.queries > 1
        batch = runner.batch(
            [texts[row][done[row] : end] for row, end in step],
            [blocks[row] for row, _ in step],
            cached=[done[row] for row, _ in step],
        )
        with torch.inference_mode():
            logits = runner.step(batch, ALL if several else LAST).logits.cpu().clone()
        asked = [(row, at) for row, end in step for at in range(done[row] if several else end - 1, end)]
        found |= dict(zip(asked, logits, strict=True))
        done |= dict(step)
    if canonical:
        _check_untouched(runner, [(done[row], owned) for row, owned in enumerate(blocks)])
    return found


def _check_untouched(runner: Runner, sequences: list[tuple[int, list[int]]]) -> None:
    """Check that all slots outside the sequences and the dummy block are unwritten."""
    size = runner.spec.block_size
    free = torch.ones(runner.spec.num_blocks, size, dtype=torch.bool)
    free[DUMMY_BLOCK] = False
    for length, owned in sequences:
        for position in range(length):
            free[owned[position // size], position % size] = False
    for name, state in runner.states.tensors():
        there = state.cpu().float()
        written = (free & ~there.isnan().flatten(2).all(-1)).nonzero().tolist()
        if written:
            raise AssertionError(
                f"state {name}: a step wrote block {written[0][0]}, offset {written[0][1]}, which holds no token "
                f"({len(written) - 1} more such slots)"
            )


@lru_cache(maxsize=64)
def reference_logits(family: str, head_dim: int, dtype: torch.dtype, texts: Texts) -> ReferenceLogits:
    """Run the reference on ``texts``."""
    before = active_backend()
    try:
        rounded = _logits(family, head_dim, dtype, dtype, texts)
        wider = torch.float64 if dtype == torch.float32 else torch.float32
        exact = _logits(family, head_dim, torch.float32, wider, texts)
    finally:
        if before is not None:
            before.activate()
    return ReferenceLogits.of(rounded, exact, dtype)


def _logits(family: str, head_dim: int, loaded: torch.dtype, computed: torch.dtype, texts: Texts) -> Sequence[Tensor]:
    needed = [math.ceil(len(text) / BLOCK) for text in texts]
    backend = reference_backend(loaded, sum(needed) * BLOCK, BLOCK)
    backend.activate()
    runner = Runner(load_model(checkpoint(family, head_dim), backend).to(computed), backend)
    free = iter(range(1, 1 + sum(needed)))
    blocks = [[next(free) for _ in range(count)] for count in needed]
    return [
        runner.step(runner.batch([text], [owned]), ALL).logits.double()
        for text, owned in zip(texts, blocks, strict=True)
    ]
