"""vLLM's cache groups: what hal's layers are to vLLM, and what vLLM's groups of them are to hal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec

import hal
from hal.engines.vllm.request import Request
from hal.errors import ModelError
from hal.nn import CausalLM
from hal.step import SEQUENCE, TOKEN, CacheGroups, PageLayout, State, StateSpec, grouped_batch

ALIGN = "align"
"""vLLM's mode of states with prefix caching: a block of states for each position where they are kept."""


def specs_of(model: CausalLM, block_size: int, *, mode: str, longest: int) -> dict[str, KVCacheSpec]:
    """Return what each layer keeps, in vLLM's classes.

    If all layers have a window, vLLM frees the blocks before the longest, and may name the null block for them. If some
    layers have a window, or keep states per sequence, vLLM gives them groups with blocks of their own.

    Args:
        block_size: tokens per block of hal's.
        mode: vLLM's ``mamba_cache_mode``.
        longest: the most tokens of a sequence.

    Raises:
        ModelError: layers keep states that cannot share memory.
    """
    dtype = next(model.parameters()).dtype
    spec = StateSpec(tuple(model.states), dtype, num_blocks=1, block_size=block_size)
    states = [state for _, _, state in spec.states()]
    recurrent = any(each.per is SEQUENCE for each in states)
    layout = None
    if recurrent or (_windows_differ(states) and model.layers_have_groups):
        try:
            layout = PageLayout.of(spec)
        except ModelError:
            if recurrent:
                raise
    if layout is None:
        return {name: _spec_of(layer, spec) for name, layer in _layers(spec)}
    if not model.layers_have_groups:
        raise ModelError(
            f"{type(model).__name__} keeps states per sequence, and its layers read one block table",
            "run the model with hal.LLM or `hal serve`",
        )
    size = layout.blocks * block_size or longest
    found: dict[str, KVCacheSpec] = {}
    for name, layer in _layers(spec):
        first = next(iter(layer.values()))
        if first.per is SEQUENCE:
            found[name] = MambaSpec(
                block_size=size if mode == ALIGN else longest,
                shapes=tuple(each.shape for each in layer.values()),
                dtypes=tuple(spec.dtype_of(each) for each in layer.values()),
                page_size_padded=layout.nbytes,
                mamba_cache_mode=mode,
            )
            continue
        heads, head_size = first.shape
        row: dict[str, Any] = {"num_kv_heads": heads, "head_size": head_size, "dtype": spec.dtype_of(first)}
        row |= {"block_size": size, "page_size_padded": layout.nbytes}
        found[name] = (
            FullAttentionSpec(**row) if first.window is None else SlidingWindowSpec(sliding_window=first.window, **row)
        )
    return found


def _windows_differ(states: Sequence[State]) -> bool:
    windows = {each.window for each in states if each.per is TOKEN}
    return None in windows and len(windows) > 1


def _layers(spec: StateSpec) -> Iterator[tuple[str, Mapping[str, State]]]:
    return ((f"layers.{index}", layer) for index, layer in enumerate(spec.layers) if layer)


def _spec_of(states: Mapping[str, State], spec: StateSpec) -> KVCacheSpec:
    """Return a specification whose blocks take the bytes of a layer's, and which says what vLLM may free."""
    size, window = spec.block_size, spec.window
    first, *others = states.values()
    if len(first.shape) == 2 and others == [first]:
        heads, head_size = first.shape
        row: dict[str, Any] = {"num_kv_heads": heads, "head_size": head_size, "dtype": spec.dtype_of(first)}
        if window is None:
            return FullAttentionSpec(block_size=size, **row)
        return SlidingWindowSpec(block_size=size, sliding_window=window, **row)
    # One row per token, as in latent attention, of all states together.
    nbytes = sum(math.prod(each.shape) * spec.dtype_of(each).itemsize for each in states.values())
    return MLAAttentionSpec(block_size=size, num_kv_heads=1, head_size=nbytes, dtype=torch.uint8)


def use_groups(model: CausalLM, block_size: int, longest: int, kv_cache_config: Any) -> VllmGroups | None:
    """Let a model read vLLM's groups of its layers. Return them; None if there is one, whose blocks are hal's.

    Args:
        block_size: tokens per block of hal's.
        longest: the most tokens of a sequence.

    Raises:
        ModelError: groups have blocks of different numbers of tokens.
    """
    groups = kv_cache_config.kv_cache_groups
    specs = [each.kv_cache_spec for each in groups]
    per_token = tuple(not isinstance(each, MambaSpec) for each in specs)
    if len(groups) <= 1 and all(per_token):
        return None
    dtype = next(model.parameters()).dtype
    spec = StateSpec(tuple(model.states), dtype, num_blocks=1, block_size=block_size)
    layers = tuple(tuple(int(name.rpartition(".")[2]) for name in each.layer_names) for each in groups)
    made = CacheGroups(layers, per_token, PageLayout.of(spec), kv_cache_config.num_blocks)
    if wrong := [
        each.block_size
        for each in specs
        if not isinstance(each, MambaSpec) and each.block_size != size_of(made, block_size)
    ]:
        raise ModelError(
            f"vLLM gives a group blocks of {wrong[0]} tokens, and the others {size_of(made, block_size)}",
            "run the model with hal.LLM or `hal serve`",
        )
    model.batch_type = grouped_batch(model.batch_type, made, len(spec.layers))
    states = [each for each in specs if isinstance(each, MambaSpec)]
    every = states[0].block_size if states and states[0].mamba_cache_mode == ALIGN else None
    return VllmGroups(made, every, math.ceil(longest / block_size))


def size_of(groups: CacheGroups, block_size: int) -> int:
    """Return the tokens of vLLM's block of keys and values."""
    return groups.layout.blocks * block_size


@attrs.frozen
class VllmGroups:
    """vLLM's blocks of each group as hal's blocks and slots.

    Attributes:
        state_interval: in mode ``align``, the tokens between two blocks of states of a sequence; else None.
        columns: the most blocks of a sequence, in hal's numbers.
    """

    groups: CacheGroups
    state_interval: int | None
    columns: int

    def tables(self, blocks: Sequence[Sequence[int]], known: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
        """Yield the number of each group with a block table, and its new blocks in hal's numbers.

        Args:
            blocks: vLLM's blocks of a sequence in each group.
            known: how many of them are not new.
        """
        layout, kinds = self.groups.layout, zip(self.groups.per_token, blocks, known, strict=True)
        for number, (given, first) in enumerate((each, first) for per_token, each, first in kinds if per_token):
            ids = [block for page in given[first:] for block in layout.block_ids(page)]
            yield number, ids[: max(0, self.columns - first * layout.blocks)]  # The last page may reach further.

    def _states(self, blocks: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        return [each for per_token, each in zip(self.groups.per_token, blocks, strict=True) if not per_token]

    def _column(self, tokens: int) -> int:
        """Return which of a sequence's blocks of states holds those after some tokens."""
        return 0 if self.state_interval is None else (tokens - 1) // self.state_interval

    def state_pages(self, blocks: Sequence[Sequence[int]], tokens: int) -> list[int]:
        """Return the pages of the states of a sequence whose step ends after ``tokens``."""
        column = self._column(tokens)
        return [each[column] for each in self._states(blocks)]

    def slots(self, blocks: Sequence[Sequence[int]], tokens: int) -> list[int]:
        """Return the slots of :meth:`state_pages`."""
        return [self.groups.layout.slot(page) for page in self.state_pages(blocks, tokens)]

    def copies(self, blocks: Sequence[Sequence[int]], before: int, tokens: int) -> list[tuple[int, int]]:
        """Return the pages to copy before a step from ``before`` to ``tokens``: the states that it goes on from."""
        source, target = self._column(before), self._column(tokens)
        if before == 0 or source == target:
            return []
        return [(each[source], each[target]) for each in self._states(blocks)]


def move_pages(groups: VllmGroups, states: hal.step.StateMemory, scheduled: Any, requests: Sequence[Request]) -> None:
    """Zero and copy the pages that vLLM's scheduler names for a step, and those that its sequences go on from.

    Args:
        scheduled: what the scheduler decided.
    """
    counts = scheduled.num_scheduled_tokens
    steps = [(each.blocks, each.computed, each.computed + counts[each.name]) for each in requests]
    # vLLM lists new blocks of keys and values. States of new sequences are for the worker to clear.
    new = [page for blocks, before, tokens in steps if not before for page in groups.state_pages(blocks, tokens)]
    if new := [*(scheduled.new_block_ids_to_zero or ()), *new]:
        states.zero_pages(new)
    asked = [(each[0], each[1]) for each in getattr(scheduled, "kv_cache_block_copies", None) or ()]
    for pairs in (asked, [pair for step in steps for pair in groups.copies(*step)]):
        if pairs:
            states.copy_pages(*map(list, zip(*pairs, strict=True)))
