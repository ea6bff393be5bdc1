"""Plans of steps as an engine would run them, and what a runner makes of one."""

from __future__ import annotations

import math
import random

import attrs
import torch
from torch import Tensor

from hal.execution.runner import Runner
from hal.step.state import DUMMY_BLOCK
from hal.testing.agreement import Texts

SPARE = 3
"""Blocks that no sequence owns, to see that nothing is written there."""


@attrs.frozen
class Plan:
    """Sequences, and the steps that bring them on.

    Attributes:
        lengths: of the prompts.
        decodes: which sequences each decode step has, in which order.
        seed: of the tokens, and of which blocks belong to whom.
    """

    lengths: tuple[int, ...]
    decodes: tuple[tuple[int, ...], ...]
    seed: int = 0

    def texts(self, vocab_size: int) -> Texts:
        """Each sequence's tokens, those that decode steps add included."""
        draw = random.Random(self.seed)
        more = [sum(row in step for step in self.decodes) for row in range(len(self.lengths))]
        return tuple(
            tuple(draw.randrange(vocab_size) for _ in range(length + count))
            for length, count in zip(self.lengths, more, strict=True)
        )

    def blocks(self, texts: Texts, block_size: int) -> list[list[int]]:
        """Each sequence's blocks, from all over the cache."""
        needed = [math.ceil(len(text) / block_size) for text in texts]
        free = list(range(DUMMY_BLOCK + 1, DUMMY_BLOCK + 1 + sum(needed) + SPARE))
        random.Random(self.seed).shuffle(free)
        return [[free.pop() for _ in range(count)] for count in needed]

    def num_tokens(self, block_size: int) -> int:
        """Tokens that a cache for it holds."""
        texts = self.texts(2)
        return (sum(math.ceil(len(text) / block_size) for text in texts) + SPARE) * block_size


def run_plan(runner: Runner, plan: Plan) -> dict[tuple[int, int], Tensor]:
    """Run it on a cache full of NaN, which no step may read before it is written.

    Returns:
        By sequence and token, the logits after it, on the CPU.

    Raises:
        AssertionError: a step wrote where no token of its belongs.
    """
    canonical = runner.backend.state_layout == "canonical"
    if canonical:
        with torch.inference_mode():
            for _, state in runner.states.tensors():
                state.fill_(math.nan)
    size = runner.spec.block_size
    texts = plan.texts(runner.model.vocab_size)
    blocks = plan.blocks(texts, size)
    batch = runner.batch([text[:length] for text, length in zip(texts, plan.lengths, strict=True)], blocks)
    logits = runner.step(batch).logits
    at = {row: length - 1 for row, length in enumerate(plan.lengths)}
    found = {(row, at[row]): each for row, each in enumerate(logits.cpu().clone())}
    for rows in plan.decodes:
        for row in rows:
            at[row] += 1
        batch = runner.batch(
            [[texts[row][at[row]]] for row in rows], [blocks[row] for row in rows], cached=[at[row] for row in rows]
        )
        with torch.inference_mode():
            logits = runner.step(batch).logits.clone()
        found |= {(row, at[row]): each for row, each in zip(rows, logits.cpu(), strict=True)}
    if canonical:
        _check_untouched(runner, [(at[row] + 1, owned) for row, owned in enumerate(blocks)])
    return found


def _check_untouched(runner: Runner, sequences: list[tuple[int, list[int]]]) -> None:
    """All slots but those of tokens, and the dummy block's, hold what they held before."""
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
                f"state {name}: a step wrote to block {written[0][0]}, offset {written[0][1]}, where no token belongs "
                f"(and {len(written) - 1} more such slots)"
            )
