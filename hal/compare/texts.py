"""The prompts, the tokens that the first run chooses for them, and the batches that every run gets of both."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from hal import ops
from hal.drivers.backend import Backend
from hal.errors import BatchError
from hal.execution.runner import Runner
from hal.nn import CausalLM
from hal.step import StateMemory
from hal.step.state import DUMMY_BLOCK

FILL = 16.0
"""What a cache holds before it is written, as reused blocks hold others' keys: a read of it must show."""


@attrs.frozen
class Prompts:
    """What is run.

    Attributes:
        token_ids: of each prompt.
        max_new_tokens: at most so many for each.
        stop_token_ids: tokens that end a text.
    """

    token_ids: tuple[tuple[int, ...], ...]
    max_new_tokens: int
    stop_token_ids: frozenset[int] = frozenset()

    def __attrs_post_init__(self) -> None:
        if not self.token_ids or not all(self.token_ids):
            raise BatchError("there are no prompts, or an empty one", "give at least one, of at least one token")
        if self.max_new_tokens < 1:
            raise BatchError(f"{self.max_new_tokens} new tokens were asked for", "ask for at least 1")

    def blocks_each(self, block_size: int) -> int:
        """Blocks of cache that a prompt takes to its end."""
        return math.ceil((max(map(len, self.token_ids)) + self.max_new_tokens) / block_size)


class Texts:
    """The texts as they grow. All runs get the first's tokens, so that they can be compared to the end.

    Attributes:
        step: the number of the next one; 0 is the prefill.
        chosen: tokens so far.
    """

    def __init__(self, prompts: Prompts, block_size: int, max_length: int) -> None:
        self._prompts = prompts
        self._texts = [list(each) for each in prompts.token_ids]
        self._running = list(range(len(self._texts)))
        self._max_length = max_length
        # No more than the model's longest text takes: graphs refuse wider block tables.
        per = min(prompts.blocks_each(block_size), math.ceil(max_length / block_size))
        self._blocks = [list(range(1 + row * per, 1 + (row + 1) * per)) for row in self._running]
        self.step = self.chosen = 0

    @property
    def running(self) -> list[int]:
        """The prompts that the next step continues: the rows of its logits."""
        return list(self._running)

    def run(self, runner: Runner) -> Tensor:
        """The next step on ``runner``; returns its logits, in float32 on the CPU."""
        blocks = [self._blocks[row] for row in self._running]
        if self.step == 0:
            batch = runner.batch([self._texts[row] for row in self._running], blocks)
        else:
            cached = [len(self._texts[row]) - 1 for row in self._running]
            batch = runner.batch([self._texts[row][-1:] for row in self._running], blocks, cached=cached)
        logits = runner.step(batch).logits
        with runner.backend.explaining(), torch.inference_mode():
            return logits.float().cpu().clone()

    def take(self, tokens: Sequence[int]) -> None:
        """Append each running prompt's token, and go on to the next step."""
        for row, token in zip(self._running, tokens, strict=True):
            self._texts[row].append(token)
        self.chosen += len(tokens)
        self.step += 1
        self._running = [row for row in self._running if not self._is_done(row)]

    def _is_done(self, row: int) -> bool:
        text = self._texts[row]
        new = len(text) - len(self._prompts.token_ids[row])
        stops = self._prompts.stop_token_ids
        return new >= self._prompts.max_new_tokens or text[-1] in stops or len(text) >= self._max_length


def likeliest(logits: Tensor) -> list[int]:
    """The token of highest logit, of each row; the lowest of equal ones."""
    tokens: list[int] = ops.operation("greedy_sample").reference(logits).tolist()
    return tokens


def new_runner(model: CausalLM, backend: Backend, *, max_sequences: int | None = None) -> Runner:
    """A runner as the backend is configured, whose cache shows what is read before it is written."""
    runner = Runner(model, backend, max_sequences=max_sequences)
    fill(runner.states)
    return runner


def fill(states: StateMemory) -> None:
    """Put :data:`FILL` into all blocks but the dummy one."""
    with torch.inference_mode():
        for _, tensor in states.tensors():
            tensor[DUMMY_BLOCK + 1 :] = FILL
