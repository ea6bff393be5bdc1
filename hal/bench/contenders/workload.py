"""What every contender computes: the same tokens over the same cache, drawn from fixed seeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import attrs
import torch
from torch import Tensor

from hal.bench.plan import Setting, Workload

DRAWN = 16
"""Sequences whose cache is drawn; those of a larger batch share them in turn, as drawing takes longer than a step."""


@attrs.frozen(eq=False)
class Contender:
    """One implementation in one mode, ready to run its step again and again.

    Attributes:
        name: as tables show it.
        step: what is timed; gives the logits ``[batch, vocab_size]`` of each sequence's last token.
        reset: not timed, before each step: brings the cache back to what it was.
        setup_seconds: what making it ready took, its first step included; loading weights excluded.
        close: frees what it holds beside the weights. It cannot run any more.
    """

    name: str
    step: Callable[[], Tensor]
    reset: Callable[[], None]
    setup_seconds: float = 0.0
    close: Callable[[], None] = lambda: None


class Side(Protocol):
    """An implementation with its weights loaded."""

    @property
    def modes(self) -> tuple[str, ...]:
        """What it can be measured in."""

    def contender(self, mode: str, inputs: Inputs) -> Contender:
        """Make one ready."""


@attrs.frozen(eq=False)
class Inputs:
    """The inputs of one batch size.

    The cache that a decode step finds is drawn too, rather than computed by a prefill: for what a step costs only its
    size counts, and at a large batch a prefill would take longer than the whole measurement.
    """

    setting: Setting
    batch_size: int

    @property
    def workload(self) -> Workload:
        """decode or prefill."""
        return self.setting.plan.workload

    @property
    def length(self) -> int:
        """Tokens in each sequence's cache (decode) or prompt (prefill)."""
        return self.setting.plan.length

    @property
    def tokens(self) -> Tensor:
        """The new tokens, ``[batch, 1]`` or ``[batch, length]``, int64, on the CPU."""
        shape = (self.batch_size, 1 if self.workload == "decode" else self.length)
        return torch.randint(self.setting.meta.vocab_size, shape, generator=torch.Generator().manual_seed(0))

    def cached(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values, each ``[batch, length, num_kv_heads, head_dim]``, of the model's dtype."""
        model, device = self.setting.meta, self.setting.backend.device.torch
        generator = torch.Generator().manual_seed(1 + layer)
        drawn = min(self.batch_size, DRAWN)
        shape = (drawn, self.length, *model.states[layer]["key"].shape)
        rows = torch.arange(self.batch_size, device=device) % drawn
        keys, values = (
            torch.empty(shape, dtype=self.setting.dtype).normal_(generator=generator).to(device)[rows] for _ in range(2)
        )
        return keys, values
