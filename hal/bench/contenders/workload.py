"""The inputs that all contenders share: the same tokens and cache, generated from fixed seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor

from hal.bench.plan import Setting, Workload

DRAWN = 16
"""Number of sequences with distinct caches; larger batches repeat them, because generation takes longer than a step."""


@attrs.frozen(eq=False)
class Contender:
    """One implementation in one mode, ready to run its step repeatedly.

    Attributes:
        name: name in tables.
        step: the timed function; computes the logits ``[batch, vocab_size]`` of each sequence's last token.
        reset: restores the cache before each step; not timed.
        setup_seconds: duration of preparation, with the first step, without loading weights.
        close: frees all resources except the weights; the contender cannot run afterwards.
        logits: returns the logits of what a step returned.
        comparable: whether it has the same weights and cache as the others, so that its logits are equal.
    """

    name: str
    step: Callable[[], Any]
    reset: Callable[[], None]
    setup_seconds: float = 0.0
    close: Callable[[], None] = lambda: None
    logits: Callable[[Any], Tensor] = lambda returned: returned
    comparable: bool = True


class Side(Protocol):
    """An implementation with its weights."""

    @property
    def modes(self) -> tuple[str, ...]:
        """Return the modes that can be measured."""

    def contender(self, mode: str, inputs: Inputs) -> Contender:
        """Prepare a contender."""


@attrs.frozen(eq=False)
class Inputs:
    """The inputs of one batch size.

    Attributes:
        setting: the benchmark.
        batch_size: the number of sequences.
        prefilled: each layer's keys and values of some sequences, as :meth:`cached` returns them, which a prefill has
            computed. If there are none, they are random. Trained weights turn rounding into other logits on a random
            cache, while a step's duration and memory do not depend on the values.
    """

    setting: Setting
    batch_size: int
    prefilled: Sequence[tuple[Tensor, Tensor]] = ()

    @property
    def workload(self) -> Workload:
        """Return ``decode`` or ``prefill``."""
        return self.setting.plan.workload

    @property
    def length(self) -> int:
        """Return the tokens per sequence in the cache (decode) or in the prompt (prefill)."""
        return self.setting.plan.length

    @property
    def tokens(self) -> Tensor:
        """Return the new tokens ``[batch, 1]`` or ``[batch, length]``, int64, on the CPU."""
        shape = (self.batch_size, 1 if self.workload == "decode" else self.length)
        return torch.randint(self.setting.meta.vocab_size, shape, generator=torch.Generator().manual_seed(0))

    def cached(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values, each ``[batch, length, num_kv_heads, head_dim]``, in the model's dtype."""
        model, device = self.setting.meta, self.setting.backend.device.torch
        if self.prefilled:
            rows = torch.arange(self.batch_size) % len(self.prefilled[layer][0])
            return self.prefilled[layer][0][rows].to(device), self.prefilled[layer][1][rows].to(device)
        generator = torch.Generator().manual_seed(1 + layer)
        drawn = min(self.batch_size, DRAWN)
        shape = (drawn, self.length, *model.states[layer]["key"].shape)
        rows = torch.arange(self.batch_size, device=device) % drawn
        keys, values = (
            torch.empty(shape, dtype=self.setting.dtype).normal_(generator=generator).to(device)[rows] for _ in range(2)
        )
        return keys, values
