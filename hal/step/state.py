"""What a model keeps between steps: declared by layer and name, and the memory that a backend gives it.

A layer of ordinary attention keeps a key and a value of every token. Latent attention keeps one compressed row, a
recurrent layer a matrix for each sequence, and a model may mix them.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

import attrs
import torch
from torch import Tensor

from hal.errors import ModelError
from hal.step.batch import DUMMY_BLOCK, DUMMY_SLOT


class Per(enum.Enum):
    """What a state has an entry for."""

    TOKEN = "token"
    SEQUENCE = "sequence"


TOKEN, SEQUENCE = Per.TOKEN, Per.SEQUENCE


def _sizes(state: State, attribute: attrs.Attribute[tuple[int, ...]], value: tuple[int, ...]) -> None:
    if not (isinstance(value, tuple) and all(type(size) is int and size > 0 for size in value)):
        raise ModelError(f"a state has the shape {value!r:.70}", "give a tuple of positive integers")


def _window(state: State, attribute: attrs.Attribute[int | None], value: int | None) -> None:
    if value is not None and not (type(value) is int and value > 0 and state.per is TOKEN):
        raise ModelError(
            f"a state per {state.per.value} has the window {value!r:.70}",
            "give a number of tokens to a state per token, or None",
        )


@attrs.frozen
class State:
    """One tensor that a layer keeps between steps.

    Attributes:
        per: ``TOKEN``, for an entry for each token, in blocks; or ``SEQUENCE``, for one for each sequence, in slots.
        shape: of an entry.
        dtype: of its elements; None for that of the model's weights.
        window: how many of the last tokens are ever read, its own included; None for all.
    """

    per: Per = attrs.field(validator=attrs.validators.instance_of(Per))
    shape: tuple[int, ...] = attrs.field(validator=_sizes)
    dtype: torch.dtype | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.instance_of(torch.dtype))
    )
    window: int | None = attrs.field(default=None, validator=_window)


LayerStates = Mapping[str, State]
"""A layer's states, by name."""


def _frozen(layer: LayerStates) -> LayerStates:
    for name, state in layer.items():
        if not isinstance(state, State):
            raise ModelError(
                f"a layer declares the state {name!r} as {state!r:.70}", "declare it: State(TOKEN, (2, 64))"
            )
    return MappingProxyType(dict(layer))


def _frozen_layers(layers: Iterable[LayerStates]) -> tuple[LayerStates, ...]:
    return tuple(map(_frozen, layers))


@attrs.frozen
class StateSpec:
    """The states of a model, and for how many tokens and sequences.

    Attributes:
        layers: each layer's states, by name.
        dtype: of states that name none.
        num_blocks: blocks that sequences can own and, before them, the dummy block.
        block_size: tokens per block.
        num_slots: slots that sequences can own and, before them, the dummy slot; 0 if no state is per sequence.
    """

    layers: tuple[LayerStates, ...] = attrs.field(converter=_frozen_layers)
    dtype: torch.dtype
    num_blocks: int
    block_size: int
    num_slots: int = 0

    @classmethod
    def key_value(
        cls, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, num_blocks: int, block_size: int
    ) -> StateSpec:
        """The states of layers of ordinary attention, all alike."""
        return cls((key_value_states(num_kv_heads, head_dim),) * num_layers, dtype, num_blocks, block_size)

    @property
    def num_tokens(self) -> int:
        """Tokens that sequences can hold together."""
        return (self.num_blocks - 1) * self.block_size

    @property
    def nbytes(self) -> int:
        """Bytes of all states in the canonical layout."""
        return sum(
            math.prod(self.shape_of(state)) * self.dtype_of(state).itemsize for _, _, state in self.states()
        )  # fmt: skip

    @property
    def token_bytes(self) -> int:
        """Bytes that one more token takes, of all layers."""
        return sum(
            math.prod(state.shape) * self.dtype_of(state).itemsize
            for _, _, state in self.states() if state.per is TOKEN
        )  # fmt: skip

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of ``num_tokens`` takes."""
        return math.ceil(num_tokens / self.block_size)

    def states(self) -> Iterator[tuple[int, str, State]]:
        """Each layer's number, and the name and declaration of each of its states."""
        for index, layer in enumerate(self.layers):
            for name, state in layer.items():
                yield index, name, state

    def shape_of(self, state: State) -> tuple[int, ...]:
        """``[num_blocks, block_size, ...]``, or ``[num_slots, ...]``: the canonical layout."""
        rows = (self.num_blocks, self.block_size) if state.per is TOKEN else (self.num_slots,)
        return (*rows, *state.shape)

    def dtype_of(self, state: State) -> torch.dtype:
        """The state's dtype, or the model's."""
        return state.dtype or self.dtype


@attrs.frozen(eq=False)
class StateMemory:
    """Memory for the states of a model: ``layers[i][name]`` is a tensor.

    In the canonical layout it is ``[num_blocks, block_size, ...]`` for a state per token and ``[num_slots, ...]`` for
    one per sequence, contiguous. A backend with another layout needs kernels for every operation that reads or writes
    such a state. Block :data:`~hal.step.batch.DUMMY_BLOCK` and slot :data:`~hal.step.batch.DUMMY_SLOT` take what
    padding rows write.
    """

    spec: StateSpec
    layers: tuple[Mapping[str, Tensor], ...]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each tensor, named as ``0.key`` is: by layer and state."""
        for index, layer in enumerate(self.layers):
            for name, tensor in layer.items():
                yield f"{index}.{name}", tensor

    def reset_slots(self, slots: Iterable[int]) -> None:
        """Zero the states per sequence in ``slots``, for sequences that begin there."""
        rows = list(slots)
        own = [self.layers[index][name] for index, name, state in self.spec.states() if state.per is SEQUENCE]
        if not rows or not own:
            return
        with torch.inference_mode():
            index = torch.tensor(rows, device=own[0].device)
            for tensor in own:
                tensor.index_fill_(0, index, 0)


KEY_VALUE = frozenset({"key_cache", "value_cache"})
"""What operations call the states of ordinary attention, which a driver may lay out in its own way."""


def key_value_states(num_kv_heads: int, head_dim: int, *, window: int | None = None) -> LayerStates:
    """What a layer of ordinary attention keeps: the keys and values of all its heads."""
    state = State(TOKEN, (num_kv_heads, head_dim), window=window)
    return {"key": state, "value": state}


def canonical_states(spec: StateSpec, device: torch.device) -> StateMemory:
    """Zeroed states in the canonical layout, made under inference mode so that they can be written under it."""
    with torch.inference_mode():
        return StateMemory(spec, tuple(
            {
                name: torch.zeros(spec.shape_of(state), dtype=spec.dtype_of(state), device=device)
                for name, state in layer.items()
            }
            for layer in spec.layers
        ))  # fmt: skip


__all__ = [
    "DUMMY_BLOCK", "DUMMY_SLOT", "KEY_VALUE", "SEQUENCE", "TOKEN", "LayerStates", "Per", "State", "StateMemory",
    "StateSpec", "canonical_states", "key_value_states",
]  # fmt: skip
