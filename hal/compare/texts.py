"""The prompts of a comparison, the tokens chosen by the reference, and the batches that all runs share."""

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
from hal.step.fields import DUMMY_BLOCK

FILL = 16.0
"""Initial value of all cache slots. It is nonzero, as in reused blocks, so that a premature read changes results."""


@attrs.frozen
class Prompts:
    """The prompts to run.

    Attributes:
        max_new_tokens: maximum number of new tokens per prompt.
        stop_token_ids: tokens that end a sequence.
    """

    token_ids: tuple[tuple[int, ...], ...]
    max_new_tokens: int
    stop_token_ids: frozenset[int] = frozenset()

    def __attrs_post_init__(self) -> None:
        if not self.token_ids or not all(self.token_ids):
            raise BatchError("there are no prompts, or a prompt is empty", "give at least one nonempty prompt")
        if self.max_new_tokens < 1:
            raise BatchError(f"max_new_tokens is {self.max_new_tokens}", "use at least 1")

    def blocks_each(self, block_size: int) -> int:
        """Return the number of cache blocks that a prompt needs with all its new tokens."""
        return math.ceil((max(map(len, self.token_ids)) + self.max_new_tokens) / block_size)


class Texts:
    """The token sequences during a comparison. All runs continue with the reference's tokens, to stay comparable.

    Args:
        prompts: the prompts.
        block_size: tokens per block of the caches.
        max_length: the most tokens of a text.
        hidden: for a model that reads another one's hidden states, those for each prompt, one row fewer than it has
            tokens. Later steps all read those that the last run of the step before computed.

    Attributes:
        step: number of the next step; 0 is the prefill.
        chosen: number of tokens chosen so far.
    """

    def __init__(self, prompts: Prompts, block_size: int, max_length: int, hidden: Sequence[Tensor] = ()) -> None:
        self._prompts = prompts
        self._ahead = int(bool(hidden))
        self._texts = [list(each[self._ahead :]) for each in prompts.token_ids]
        self._running = list(range(len(self._texts)))
        self._max_length = max_length
        # Limited by the model's maximum length: graphs refuse wider block tables.
        per = min(prompts.blocks_each(block_size), math.ceil(max_length / block_size))
        self._blocks = [list(range(1 + row * per, 1 + (row + 1) * per)) for row in self._running]
        self._hidden, self._next = list(hidden), list(hidden)
        self.step = self.chosen = 0

    @property
    def running(self) -> list[int]:
        """Return the prompts that the next step continues, in the order of its logits' rows."""
        return list(self._running)

    def run(self, runner: Runner) -> Tensor:
        """Run the next step on ``runner``; return its logits ``[running, vocab_size]``, in float32 on the CPU."""
        blocks = [self._blocks[row] for row in self._running]
        tokens = [self._texts[row] if self.step == 0 else self._texts[row][-1:] for row in self._running]
        cached = [0 if self.step == 0 else len(self._texts[row]) - 1 for row in self._running]
        fields = {}
        if self._ahead:
            hidden = torch.cat([self._hidden[row] for row in self._running])
            fields = {"hidden_states": hidden.to(runner.backend.device.torch)}
        output = runner.step(runner.batch(tokens, blocks, cached=cached, **fields))
        with runner.backend.translating_errors(), torch.inference_mode():
            ends = torch.tensor(list(map(len, tokens))).cumsum(0) - 1
            states = output.hidden_states.cpu()[ends].clone() if self._ahead else ()
            self._next = list(self._hidden)
            for row, state in zip(self._running, states, strict=False):
                self._next[row] = state[None]
            return output.logits.float().cpu().clone()

    def take(self, tokens: Sequence[int]) -> None:
        """Append a token to each running prompt, and advance to the next step."""
        for row, token in zip(self._running, tokens, strict=True):
            self._texts[row].append(token)
        self.chosen += len(tokens)
        self.step, self._hidden = self.step + 1, self._next
        self._running = [row for row in self._running if not self._is_done(row)]

    def _is_done(self, row: int) -> bool:
        text = self._texts[row]
        new = len(text) + self._ahead - len(self._prompts.token_ids[row])
        stops = self._prompts.stop_token_ids
        return new >= self._prompts.max_new_tokens or text[-1] in stops or len(text) >= self._max_length


def most_likely(logits: Tensor) -> list[int]:
    """Return the token with the highest logit of each row; of equal ones, the lowest."""
    tokens: list[int] = ops.operation("greedy_sample").reference(logits).tolist()
    return tokens


def new_runner(model: CausalLM, backend: Backend, *, max_sequences: int | None = None) -> Runner:
    """Create a runner with the backend's configuration, and fill its cache with :data:`FILL`."""
    runner = Runner(model, backend, max_sequences=max_sequences)
    fill(runner.states)
    return runner


def fill(states: StateMemory) -> None:
    """Fill all blocks except the dummy block with :data:`FILL`."""
    with torch.inference_mode():
        for _, tensor in states.tensors():
            tensor[DUMMY_BLOCK + 1 :] = FILL
