"""What the layers of a model choose for each token: experts, and positions to attend to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextvars import ContextVar

import attrs
import torch
from torch import Tensor, nn

EXPERTS, POSITIONS = "experts", "positions"


@attrs.frozen
class Choice:
    """What a layer chooses for each token. A module declares it as its attribute ``chooses``.

    Attributes:
        name: ``experts`` or ``positions``.
        shape: the shape of a token's choice: ``[top_k]`` of experts, ``[selected]`` or ``[heads, selected]`` of
            positions, which -1 follows.
        bound: the number of experts, each of which a token takes once; None for positions.
    """

    name: str
    shape: tuple[int, ...]
    bound: int | None = None


@attrs.frozen
class Choices:
    """What all layers of a model choose that is recorded or replayed; :func:`keep_choices` makes it.

    Attributes:
        record: the names of what is recorded.
        replay: the names of what is replayed.
        kinds: what each layer chooses, by name.
        layers: the number of layers that choose, by name.
        max_length: the maximum sequence length of the model.
    """

    record: tuple[str, ...]
    replay: tuple[str, ...]
    kinds: Mapping[str, Choice]
    layers: Mapping[str, int]
    max_length: int

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a token's choices in all layers, ``[layers, ...]``."""
        return self.layers[name], *self.kinds[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the smallest of the dtypes uint8, int16 and int32 that has all numbers of a choice."""
        bound = self.kinds[name].bound
        if bound is not None and bound <= 1 << 8:
            return torch.uint8
        return torch.int16 if (bound or self.max_length) <= 1 << 15 else torch.int32


@attrs.frozen
class ChoosingStep:
    """A step that a thread runs or traces.

    Attributes:
        found: what its layers have used, of each name that is recorded or replayed.
        given: what they are to use, of each name that is replayed, in their order.
    """

    found: Mapping[str, list[Tensor]]
    given: Mapping[str, Iterator[Tensor]]


RUNNING: ContextVar[ChoosingStep | None] = ContextVar("hal_choices", default=None)
"""The step of this thread, if its model keeps choices."""


def chosen(layer: nn.Module, own: Tensor) -> Tensor:
    """Return what a layer of the running step uses: its own choice, or the one that the step replays.

    A layer calls it once in each step for what it declares in ``chooses``, and uses what it returns. Unless the model
    keeps such choices, that is ``own``, and nothing runs.

    Args:
        layer: the layer. :func:`keep_choices` sets its attribute ``kept_choice``, which is None otherwise.
        own: ``[tokens, ...]``, int32: the choice of the layer.
    """
    name = getattr(layer, "kept_choice", None)
    if name is None:  # Code that torch.compile traces reads no context variable.
        return own
    step = RUNNING.get()
    if step is None:
        return own
    if name in step.given:
        given = next(step.given[name]).view(own.shape)
        own = torch.where(given[..., :1] < 0, own, given)
    step.found[name].append(own)
    return own


def name_of_field(name: str) -> str:
    """Return the field of a batch that has the choices to replay: ``[tokens, layers * ...]``, int32; -1 for none."""
    return f"given_{name}"
