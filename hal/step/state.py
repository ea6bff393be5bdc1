"""Model states: declarations of the tensors that a model keeps between steps, and their memory.

Ordinary attention keeps a key and a value of every token. Latent attention keeps one compressed row per token, and a
recurrent layer a matrix per sequence. A model may mix them.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import attrs
import torch
from torch import Tensor

from hal.device.device import to_device
from hal.errors import ConfigError, ModelError


class Per(enum.Enum):
    """The unit that a state has one entry for."""

    TOKEN = "token"
    SEQUENCE = "sequence"


TOKEN, SEQUENCE = Per.TOKEN, Per.SEQUENCE


def _sizes(state: State, attribute: attrs.Attribute[tuple[int, ...]], value: tuple[int, ...]) -> None:
    if not (isinstance(value, tuple) and all(type(size) is int and size > 0 for size in value)):
        raise ModelError(
            f"a state has the shape {value!r:.70}, not a tuple of positive integers", "give State a valid shape"
        )


def _window(state: State, attribute: attrs.Attribute[int | None], value: int | None) -> None:
    if value is not None and not (type(value) is int and value > 0 and state.per is TOKEN):
        raise ModelError(
            f"a state per {state.per.value} has window = {value!r:.70}",
            "set window to None, or, for a state per token, to a positive number of tokens",
        )


def _group(state: State, attribute: attrs.Attribute[int], value: int) -> None:
    if not (type(value) is int and value > 0 and (value == 1 or state.per is TOKEN)):
        raise ModelError(
            f"a state per {state.per.value} has group = {value!r:.70}",
            "set group to 1, or, for a state per token, to a positive number of tokens",
        )


@attrs.frozen
class State:
    """One tensor that a layer keeps between steps.

    Attributes:
        per: ``TOKEN`` for an entry per token, in blocks; ``SEQUENCE`` for an entry per sequence, in slots.
        shape: the shape of an entry.
        dtype: the dtype; None for the dtype of the model's weights.
        window: the number of most recent tokens that are read, including the current one; None for all.
        group: for a state per token, the number of consecutive tokens that share an entry. It divides the block size.
        selected: the most entries that a token reads, which a selection finds among all; None for all.
        saved: for a state per sequence, whether a step keeps it after each token where a batch has slots for that; see
            :func:`~hal.step.rollback_batch`. Without it, the model refuses drafts, which could not be dropped.
    """

    per: Per = attrs.field(validator=attrs.validators.instance_of(Per))
    shape: tuple[int, ...] = attrs.field(validator=_sizes)
    dtype: torch.dtype | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.instance_of(torch.dtype))
    )
    window: int | None = attrs.field(default=None, validator=_window)
    group: int = attrs.field(default=1, validator=_group)
    selected: int | None = None
    saved: bool = False


LayerStates = Mapping[str, State]
"""A layer's states, by name."""


def _frozen(layer: LayerStates) -> LayerStates:
    for name, state in layer.items():
        if not isinstance(state, State):
            raise ModelError(
                f"a layer declares the state {name!r} as {state!r:.70}, which is not a hal.step.State",
                "declare it as, for example, State(TOKEN, (2, 64))",
            )
    return MappingProxyType(dict(layer))


def _frozen_layers(layers: Iterable[LayerStates]) -> tuple[LayerStates, ...]:
    return tuple(map(_frozen, layers))


@attrs.frozen
class StateSpec:
    """The states of a model, and the number of tokens and sequences that they hold.

    Attributes:
        layers: the states of each layer, by name.
        dtype: the dtype of states that declare none.
        num_blocks: the number of blocks, including the dummy block.
        block_size: tokens per block.
        num_slots: the number of slots, including the dummy slot; 0 if no state is per sequence.
        num_saved: how many of them, the last ones, hold saved states of prefixes.
    """

    layers: tuple[LayerStates, ...] = attrs.field(converter=_frozen_layers)
    dtype: torch.dtype
    num_blocks: int
    block_size: int
    num_slots: int = 0
    num_saved: int = 0

    def __attrs_post_init__(self) -> None:
        for index, name, state in self.states():
            if self.block_size % state.group:
                raise ConfigError(
                    f"layer {index} keeps its {name} for groups of {state.group} tokens, and a block has "
                    f"{self.block_size}",
                    f"set cache.block_size to a multiple of {state.group}",
                )

    @classmethod
    def key_value(
        cls, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, num_blocks: int, block_size: int
    ) -> StateSpec:
        """Return the states of identical layers of ordinary attention."""
        return cls((key_value_states(num_kv_heads, head_dim),) * num_layers, dtype, num_blocks, block_size)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that all sequences can hold together."""
        return (self.num_blocks - 1) * self.block_size

    @property
    def nbytes(self) -> int:
        """Bytes of all states in the canonical layout."""
        return sum(math.prod(self.shape_of(state)) * self.dtype_of(state).itemsize for _, _, state in self.states())

    @property
    def token_bytes(self) -> int:
        """Bytes per token, of all layers."""
        return sum(self.token_bytes_of(state) for _, _, state in self.states() if state.per is TOKEN)

    def token_bytes_of(self, state: State) -> int:
        """Return a token's share of the bytes of a state, rounded up; the bytes of an entry per sequence."""
        return math.ceil(math.prod(state.shape) * self.dtype_of(state).itemsize / state.group)

    @property
    def window(self) -> int | None:
        """The number of most recent tokens that the layers read; None if a layer reads all."""
        windows = [state.window for _, _, state in self.states() if state.per is TOKEN]
        return None if None in windows else max((each for each in windows if each), default=None)

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks for a sequence of ``num_tokens``."""
        return math.ceil(num_tokens / self.block_size)

    def states(self) -> Iterator[tuple[int, str, State]]:
        """Yield the layer index, name and declaration of each state."""
        for index, layer in enumerate(self.layers):
            for name, state in layer.items():
                yield index, name, state

    def shape_of(self, state: State) -> tuple[int, ...]:
        """Return the canonical shape: ``[num_blocks, block_size // group, ...]``, or ``[num_slots, ...]``."""
        rows = (self.num_blocks, self.block_size // state.group) if state.per is TOKEN else (self.num_slots,)
        return (*rows, *state.shape)

    def dtype_of(self, state: State) -> torch.dtype:
        """Return the state's dtype, or else the model's."""
        return state.dtype or self.dtype


@attrs.frozen(eq=False)
class StateMemory:
    """Memory for the states of a model: ``layers[i][name]`` is a tensor.

    In the canonical layout, a state per token is ``[num_blocks, block_size // group, ...]`` and a state per sequence is
    ``[num_slots, ...]``, contiguous. A backend with another layout needs a kernel for every operation that reads or
    writes such a state. Padding rows write to block :data:`~hal.step.fields.DUMMY_BLOCK` and slot
    :data:`~hal.step.fields.DUMMY_SLOT`.

    Attributes:
        spec: what it holds.
        layers: the tensors.
        pages: the same memory if layers of several cache groups share it: tensors ``[num_pages, ...]``; else empty.
    """

    spec: StateSpec
    layers: tuple[Mapping[str, Tensor], ...]
    pages: tuple[Tensor, ...] = ()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor with a name of layer and state, such as ``0.key``."""
        for index, layer in enumerate(self.layers):
            for name, tensor in layer.items():
                yield f"{index}.{name}", tensor

    def reset_slots(self, slots: Iterable[int]) -> None:
        """Zero the states per sequence in ``slots``, for new sequences."""
        rows, own = list(slots), self._per_sequence
        if not rows or not own:
            return
        with torch.inference_mode():
            index = torch.tensor(rows, device=own[0].device)
            for tensor in own:
                tensor.index_fill_(0, index, 0)

    def copy_slot(self, source: int, target: int) -> None:
        """Copy the states per sequence in one slot to another."""
        with torch.inference_mode():
            for tensor in self._per_sequence:
                tensor[target].copy_(tensor[source])

    def zero_pages(self, pages: Sequence[int]) -> None:
        """Zero pages, which held values of others."""
        with torch.inference_mode():
            index = to_device(pages, self.pages[0].device)
            for tensor in self.pages:
                tensor.index_fill_(0, index, 0)

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy pages to others."""
        with torch.inference_mode():
            index = to_device([sources, targets], self.pages[0].device)
            for tensor in self.pages:
                tensor[index[1]] = tensor[index[0]]

    @property
    def _per_sequence(self) -> list[Tensor]:
        return [self.layers[index][name] for index, name, state in self.spec.states() if state.per is SEQUENCE]


KEY_VALUE = frozenset({"key_cache", "value_cache"})
"""The argument names of attention states in operations. Drivers may choose the layout of these states."""


def key_value_states(
    num_kv_heads: int, head_dim: int, *, window: int | None = None, quantized: torch.dtype | None = None
) -> LayerStates:
    """Return the states of a layer of ordinary attention: the keys and values of all its heads.

    Args:
        num_kv_heads: the number of heads.
        head_dim: the elements of a head.
        window: see :class:`State`.
        quantized: the dtype of quantized numbers, whose scales, one for each head, are states too; None for none.
    """
    state = State(TOKEN, (num_kv_heads, head_dim), quantized, window)
    if quantized is None:
        return {"key": state, "value": state}
    scale = State(TOKEN, (num_kv_heads,), torch.float32, window)
    return {"key": state, "value": state, "key_scale": scale, "value_scale": scale}


def canonical_states(spec: StateSpec, device: torch.device, zeros: Callable[..., Tensor] | None = None) -> StateMemory:
    """Return zeroed states in the canonical layout, as inference tensors, which inference mode can write.

    Args:
        zeros: returns zeros on the device, from a shape and the keyword ``dtype``; None for torch's.
    """
    zeros = zeros or partial(torch.zeros, device=device)
    with torch.inference_mode():
        return StateMemory(
            spec,
            tuple(
                {name: zeros(spec.shape_of(state), dtype=spec.dtype_of(state)) for name, state in layer.items()}
                for layer in spec.layers
            ),
        )
