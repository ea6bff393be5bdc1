"""The inputs that all contenders share: the same tokens and cache, generated from fixed seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor

from hal.bench.plan import Setting, Workload
from hal.step import SEQUENCE

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
        prefilled: what each layer keeps of some sequences, as :meth:`cached` returns it, which a prefill has
            computed. If there is none, it is random. Trained weights turn rounding into other logits on a random
            cache, while a step's duration and memory do not depend on the values.
    """

    setting: Setting
    batch_size: int
    prefilled: Sequence[Mapping[str, Tensor]] = ()

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

    def cached(self, layer: int) -> Mapping[str, Tensor]:
        """Return what a layer keeps of the sequences, by name.

        These are its states per sequence, each ``[batch, ...]``; or else ``key`` and ``value``, each ``[batch, length,
        num_kv_heads, head_dim]`` in the model's dtype.
        """
        model, device = self.setting.meta, self.setting.backend.device.torch
        if self.prefilled:
            held = self.prefilled[layer]
            rows = torch.arange(self.batch_size) % len(next(iter(held.values())))
            return {name: each[rows].to(device) for name, each in held.items()}
        generator = torch.Generator().manual_seed(1 + layer)
        drawn = min(self.batch_size, DRAWN)
        states, dtype = model.states[layer], self.setting.dtype
        kept = {name: (each.shape, each.dtype or dtype) for name, each in states.items() if each.per is SEQUENCE}
        kept = kept or dict.fromkeys(("key", "value"), ((self.length, *states["key"].shape), dtype))
        rows = torch.arange(self.batch_size, device=device) % drawn
        return {
            name: torch.empty(drawn, *shape, dtype=kind).normal_(generator=generator).to(device)[rows]
            for name, (shape, kind) in kept.items()
        }
