"""The cache groups of a model, and the memory that their layers share: pages, each of one group at a time.

A cache group is the layers that share a block table, or the slots of sequences.

An engine gives each group its own blocks of one pool. Layers at the same place of their groups share memory: a page is
an engine's block there, and holds the keys and values of some tokens, or the states of one sequence. So that tensors
stay contiguous, their blocks and slots are numbered through all pages: block ``i`` of page ``p`` is
``p * 2 * blocks + i``, and its slot is ``p * slots``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import attrs
import torch
from torch import Tensor

from hal.errors import ModelError
from hal.step.state import SEQUENCE, TOKEN, StateMemory, StateSpec


@attrs.frozen
class PageLayout:
    """How a page holds the states of a layer, whatever its group.

    Attributes:
        blocks: blocks of tokens of a page.
        slots: slots of sequences of a page, of which the first is used; 0 if no layer keeps states per sequence.
        nbytes: the bytes of a page.
    """

    blocks: int
    slots: int
    nbytes: int

    @classmethod
    def of(cls, spec: StateSpec) -> PageLayout:
        """Return the smallest layout for the layers of a model.

        The largest state per sequence shares its bytes with keys and values. Others have their own.

        Raises:
            ModelError: the layers keep something else than two states of one size per token, or states of different
                sizes per sequence.
        """
        half, shared, others = _sizes(spec)
        if not shared:
            return cls(1, 0, 2 * half)
        nbytes = math.lcm(2 * half, shared) if half else shared
        slots = nbytes // shared
        return cls(nbytes // (2 * half) if half else 0, slots, nbytes + slots * others)

    def block_ids(self, page: int) -> range:
        """Return the blocks of tokens of a page."""
        first = page * 2 * self.blocks
        return range(first, first + self.blocks)

    def slot(self, page: int) -> int:
        """Return the slot of a sequence in a page."""
        return page * self.slots

    def spec(self, spec: StateSpec, pages: int) -> StateSpec:
        """Return the specification of a model's states in ``pages`` pages, including the dummy page 0."""
        return attrs.evolve(spec, num_blocks=(2 * pages - 1) * self.blocks, num_slots=pages * self.slots)


def _sizes(spec: StateSpec) -> tuple[int, int, int]:
    """Return the bytes of a block of keys, those of the largest state per sequence, and those of the others."""
    halves, shared, others = set[int](), set[int](), set[int]()
    for layer in spec.layers:
        entries = {name: math.prod(each.shape) * spec.dtype_of(each).itemsize for name, each in layer.items()}
        kinds = {(each.per, each.group) for each in layer.values()}
        if kinds == {(SEQUENCE, 1)}:
            shared.add(max(entries.values()))
            others.add(sum(entries.values()) - max(entries.values()))
        elif kinds == {(TOKEN, 1)} and len(entries) == 2 and len({*entries.values()}) == 1:
            halves.add(next(iter(entries.values())) * spec.block_size)
        elif kinds:
            raise ModelError(
                f"a layer keeps {dict(layer)!s:.200}, which cannot share memory with other layers",
                "run the model with hal.LLM or `hal serve`",
            )
    if max(map(len, (halves, shared, others))) > 1:
        raise ModelError(
            f"layers keep {sorted(halves)} bytes per block, and {sorted(shared)} or {sorted(others)} per sequence: "
            "layers that share memory must keep equal ones",
            "run the model with hal.LLM or `hal serve`",
        )
    half, largest, rest = (next(iter(each), 0) for each in (halves, shared, others))
    return half, largest, rest


def paged_states(
    spec: StateSpec, layout: PageLayout, pages: int, groups: tuple[tuple[int, ...], ...], device: torch.device
) -> StateMemory:
    """Return zeroed states of a model, of which layers at the same place of their groups share memory.

    Args:
        spec: the model's states; see :meth:`PageLayout.spec`.
        layout: the layout of a page.
        pages: their number.
        groups: the layers of each group, in order.
        device: the device.
    """
    layers: list[Mapping[str, Tensor]] = [{} for _ in spec.layers]
    memory: list[Tensor] = []
    half, shared, _ = _sizes(spec)
    whole = 2 * half * layout.blocks or shared * layout.slots
    with torch.inference_mode():
        for place in range(max(map(len, groups))):
            buffer = torch.zeros(pages * whole // 4, dtype=torch.int32, device=device)
            memory.append(buffer.view(pages, -1))
            further: dict[str, Tensor] = {}
            for layer in (group[place] for group in groups if place < len(group)):
                states = spec.layers[layer]
                largest = max(states, key=lambda name: _entry(spec, layer, name))
                found = {}
                for index, (name, state) in enumerate(states.items()):
                    shape, dtype = spec.shape_of(state), spec.dtype_of(state)
                    if state.per is TOKEN:
                        rows = buffer.view(dtype).view(-1, *shape[1:])
                        found[name] = rows[index * layout.blocks :][: spec.num_blocks]
                    elif name == largest:
                        found[name] = buffer.view(dtype).view(shape)
                    else:
                        if name not in further:
                            further[name] = torch.zeros(shape, dtype=dtype, device=device)
                            memory.append(further[name].view(pages, -1))
                        found[name] = further[name]
                layers[layer] = found
        return StateMemory(spec, tuple(layers), tuple(memory))


def _entry(spec: StateSpec, layer: int, name: str) -> int:
    state = spec.layers[layer][name]
    return math.prod(state.shape) * spec.dtype_of(state).itemsize


@attrs.frozen
class CacheGroups:
    """The cache groups of a model. Groups of layers with states per token, and per sequence, are numbered apart.

    Attributes:
        layers: the layers of each group, in order. A layer without states is in none.
        per_token: whether each group's layers keep states per token.
        layout: the layout of the pages.
        num_pages: the number of pages, including the dummy page.
    """

    layers: tuple[tuple[int, ...], ...]
    per_token: tuple[bool, ...]
    layout: PageLayout
    num_pages: int

    def number(self, group: int) -> int:
        """Return the number of a group among those of its kind."""
        return self.per_token[:group].count(self.per_token[group])

    @property
    def num_tables(self) -> int:
        """The number of groups of layers with states per token."""
        return sum(self.per_token)

    @property
    def num_slots(self) -> int:
        """The number of groups of layers with states per sequence."""
        return len(self.per_token) - self.num_tables
