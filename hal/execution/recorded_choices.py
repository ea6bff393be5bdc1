"""What a model's layers chose for the tokens in its cache, on the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from hal.drivers.backend import Backend
from hal.execution.step_output import HostCopy, StepOutput
from hal.nn.choices import Choices


class RecordedChoices:
    """The choices for each slot of the cache, so that tokens of a prefix that is used again keep theirs.

    The system maps pages of this memory on first use. Threading: one thread at a time.

    Args:
        choices: what the model records.
        backend: runs its steps.
        num_blocks: the blocks of the cache.
        block_size: tokens per block.
    """

    def __init__(self, choices: Choices, backend: Backend, num_blocks: int, block_size: int) -> None:
        self._backend, self._block_size, slots = backend, block_size, num_blocks * block_size
        self._memory = {
            name: torch.empty(slots, *choices.shape(name), dtype=choices.dtype(name)) for name in choices.record
        }
        self._copies: deque[HostCopy] = deque()

    def record(self, slots: Tensor, output: StepOutput) -> None:
        """Keep what a step recorded. It does not wait for the step.

        Args:
            slots: ``[tokens]``: the cache slot of each token.
            output: the step's.
        """
        self._copies.append(HostCopy(self._backend, slots, *(output.extra[name] for name in self._memory)))
        while self._copies and self._copies[0].arrived:
            self._write()

    def read(self, blocks: Sequence[int], tokens: int) -> dict[str, Tensor]:
        """Return the choices for the first tokens of a sequence. Waits for the steps that have run.

        Args:
            blocks: its blocks, in order.
            tokens: the number of tokens, which are in the cache.

        Returns:
            ``[tokens, layers, ...]`` by name, of the smallest of the dtypes uint8, int16 and int32 that has all
            numbers.
        """
        while self._copies:
            self._write()
        slots = torch.tensor(blocks)[:, None] * self._block_size + torch.arange(self._block_size)
        return {name: each[slots.flatten()[:tokens]] for name, each in self._memory.items()}

    def _write(self) -> None:
        slots, *found = self._copies.popleft().wait()
        for each, new in zip(self._memory.values(), found, strict=True):
            each[slots.long()] = new.to(each.dtype)
