"""The interface of mixers: the parts of decoder layers that let a token read other tokens."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from hal.device.group import Group
from hal.nn.model import LayerState
from hal.nn.rotary import RotaryEmbedding
from hal.step.state import LayerStates

Angles = tuple[Tensor, Tensor] | None
"""The cos and sin of a layer's positions; None for a layer without a rotary embedding."""


class Mixer(Protocol):
    """Lets a token read other tokens, such as :class:`SelfAttention` and :class:`GatedDeltaNet`; a module.

    Attributes:
        rotaries: the rotary embedding, in a tuple; empty for none. Layers share it.
        states: the states of the layer on this rank, by name.
        causal: whether a token reads only tokens up to itself.
    """

    @property
    def rotaries(self) -> tuple[RotaryEmbedding, ...]: ...

    @property
    def states(self) -> LayerStates: ...

    @property
    def causal(self) -> bool: ...

    def split(self, tensor: Group) -> None:
        """Compute this rank's part from now on."""

    def __call__(self, hidden: Tensor, angles: Angles, batch: Any, state: LayerState) -> Tensor:
        """Map ``[tokens, hidden_size]`` to the same shape.

        What :meth:`hal.nn.Decoder.further` returns for the layer follows.

        Args:
            hidden: the tokens.
            angles: of the rotary embedding; None without one.
            batch: the step, of the model's ``batch_type``.
            state: the layer's states.
        """
