"""The states of a model, known from its config or allocated by a runner, and whether both fit a backend."""

from __future__ import annotations

import gc
import math
from pathlib import Path

import attrs
import torch

from hal.checkpoint.checkpoint import Checkpoint
from hal.checkpoint.loading import build_model
from hal.config.settings import CacheConfig, CacheDType
from hal.device.device import Device
from hal.device.group import SOLO, Group
from hal.device.host_capacity import host_memory
from hal.drivers.backend import Backend
from hal.drivers.backend_checks import check_block_size
from hal.errors import ConfigError
from hal.nn import CausalLM
from hal.step import StateMemory, StateSpec
from hal.step.block_allocator import SavedStates
from hal.step.fields import DUMMY_BLOCK, DUMMY_SLOT
from hal.step.page_layout import paged_states
from hal.step.state import SEQUENCE

SAVED_INTERVAL = 256
"""Tokens between saved states, unless the config says otherwise. Shorter steps of prompts would be slow."""
HOST_BYTES = 48
"""Bytes of the host that a block takes in the list of free blocks: its number, and the reference to it."""


def state_spec(
    checkpoint: str | Path | Checkpoint,
    *,
    block_size: int,
    num_blocks: int = DUMMY_BLOCK + 1,
    num_sequences: int = 0,
    dtype: torch.dtype | None = None,
    ranks: int = 1,
    cache_dtype: CacheDType = "auto",
) -> StateSpec:
    """Return the specification of a checkpoint's states, without a backend, from its config.

    Args:
        checkpoint: the checkpoint, or its folder. Its weights are not read.
        block_size: tokens per block.
        num_blocks: the number of blocks, including the dummy block.
        num_sequences: concurrent sequences, for states per sequence.
        dtype: the dtype of weights; None for the checkpoint's.
        ranks: the number of ranks that split each layer.
        cache_dtype: ``cache.dtype`` of a configuration.

    Raises:
        CheckpointError: the checkpoint is damaged, or does not fit its architecture.
        ConfigError: the model does not support its config, or ranks cannot split it.
        ModelError: the model class cannot be imported.
    """
    opened = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint.open(checkpoint)
    group = SOLO if ranks == 1 else Group("planned", size=ranks, planned=True)
    model = build_model(opened, tensor=group, cache_dtype=cache_dtype)
    return StateSpec(
        tuple(model.states),
        dtype or opened.dtype,
        num_blocks,
        block_size,
        num_sequences + DUMMY_SLOT + 1 if states_per_sequence(model) else 0,
    )


def states_per_sequence(model: CausalLM) -> list[str]:
    """Return the names of a model's states per sequence."""
    return [name for layer in model.states for name, state in layer.items() if state.per is SEQUENCE]


def block_size_for(model: CausalLM, backend: Backend) -> int:
    """Return the tokens per block: those of the configuration, or the fewest that suit the backend and all groups.

    Args:
        model: the model, whose states may have an entry for each group of tokens.
        backend: the backend.
    """
    size = backend.block_size
    if backend.config.cache.block_size is None:
        size = math.lcm(size, *(state.group for layer in model.states for state in layer.values()))
        check_block_size(backend.name, size, backend.limits.block_sizes)
    return size


def spec_of(model: CausalLM, backend: Backend, num_blocks: int | None = None) -> StateSpec:
    """Return the specification of a model's states, for the tokens and sequences that the backend's config sets.

    Args:
        model: the model.
        backend: the backend.
        num_blocks: see :class:`hal.Runner`.
    """
    cache = backend.config.cache
    if num_blocks is not None and not (type(num_blocks) is int and num_blocks > DUMMY_BLOCK + 1):
        raise ConfigError(
            f"num_blocks is {num_blocks!r:.70}", f"pass an integer of {DUMMY_BLOCK + 2} or more: one is the dummy block"
        )
    in_slots = states_per_sequence(model)
    saved = 0
    if in_slots and cache.reuse_prefixes:
        if cache.saved_states is None:
            raise ConfigError(
                f"cache.reuse_prefixes is set, but {type(model).__name__} keeps {in_slots[0]} per sequence, and "
                "cache.saved_states gives no room for the states of prefixes",
                "set cache.saved_states to the number of prefixes to keep, or leave cache.reuse_prefixes out",
            )
        saved = cache.saved_states
    size = block_size_for(model, backend)
    spec = StateSpec(
        tuple(model.states),
        dtype=next(model.parameters()).dtype,
        num_blocks=num_blocks or math.ceil(cache.num_tokens / size) + DUMMY_BLOCK + 1,
        block_size=size,
        num_slots=cache.num_sequences * model.batch_type.saves + DUMMY_SLOT + 1 + saved if in_slots else 0,
        num_saved=saved,
    )
    groups = model.batch_type.groups
    return spec if groups is None else groups.layout.spec(spec, groups.num_pages)


def allocated(model: CausalLM, backend: Backend, spec: StateSpec) -> StateMemory:
    """Return memory for a model's states: the backend's, or pages if the model's layers are in several cache groups.

    Raises:
        ConfigError: there are several groups, and the backend's states have another layout than the canonical one.
    """
    groups = model.batch_type.groups
    if groups is None:
        return backend.allocate(spec)
    if backend.state_layout != "canonical":
        raise ConfigError(
            f"the backend {backend.name} lays states out as {backend.state_layout}, and layers of several cache groups "
            "share memory in the canonical layout",
            "leave out the option that chose that layout",
        )
    return paged_states(spec, groups.layout, groups.num_pages, groups.layers, backend.device.torch)


def windows_of(model: CausalLM, spec: StateSpec) -> list[int | None]:
    """Return the tokens that the layers of each cache group read, for groups with a block table; None for all."""
    groups = model.batch_type.groups
    if groups is None:
        return [spec.window]
    return [
        attrs.evolve(spec, layers=[spec.layers[each] for each in layers]).window
        for layers, per_token in zip(groups.layers, groups.per_token, strict=True)
        if per_token
    ]


def saved_states(states: StateMemory, cache: CacheConfig) -> SavedStates | None:
    """Return what saves the states per sequence of prefixes; None if there are no slots for them.

    Raises:
        ConfigError: the interval of the places is no multiple of the block size.
    """
    spec = states.spec
    if not spec.num_saved:
        return None
    size, interval = spec.block_size, cache.saved_states_interval
    if interval is None:
        interval = math.ceil(SAVED_INTERVAL / size) * size
    if interval % size:
        raise ConfigError(
            f"cache.saved_states_interval is {interval}, no multiple of the block size {size}",
            f"set it to a multiple of {size}, or leave it out",
        )
    return SavedStates(range(spec.num_slots - spec.num_saved, spec.num_slots), interval, states.copy_slot)


def longest_sequence(model: CausalLM, asked: int | None) -> int:
    """Return the most tokens of a sequence: those asked for, or the model's maximum.

    Raises:
        ConfigError: the model does not take as many, or it is not a positive integer.
    """
    if asked is None:
        return model.max_length
    if not (type(asked) is int and 1 <= asked <= model.max_length):
        raise ConfigError(
            f"sequences of {asked!r:.70} tokens were asked for, and {type(model).__name__} takes 1 to "
            f"{model.max_length}",
            f"ask for a maximum length of at most {model.max_length}",
        )
    return asked


def check_fits(spec: StateSpec, backend: Backend) -> None:
    """Raise ConfigError unless the states fit the free memory of the backend's device, and their blocks the host's."""
    host, _ = host_memory()
    if spec.num_blocks * HOST_BYTES > host:
        raise ConfigError(
            f"the list of the cache's {spec.num_blocks} blocks takes {spec.num_blocks * HOST_BYTES >> 20} MiB of the "
            f"host's memory, and {host >> 20} MiB are free",
            "lower cache.num_tokens, or raise cache.block_size",
        )
    if spec.nbytes > (free := free_memory(backend.device, spec.nbytes)):
        raise ConfigError(
            f"a cache of {spec.num_tokens} tokens takes {spec.nbytes >> 20} MiB of {free >> 20} MiB free",
            "lower cache.num_tokens, or the runner's num_blocks",
        )


def free_memory(device: Device, wanted: int) -> int:
    """Return the free bytes of a device. If fewer than ``wanted`` are free, unused memory is freed first."""
    if wanted > device.memory_stats().free:
        gc.collect()  # An unused runner may still hold memory: traces leave reference cycles.
        device.empty_cache()
    return device.memory_stats().free


def check_placed(model: CausalLM, backend: Backend) -> None:
    """Raise ConfigError if a model was prepared by another backend, or is on another device."""
    if model.prepared_by not in (None, backend.name):
        raise ConfigError(
            f"the model's weights were prepared by the backend {model.prepared_by}, not by {backend.name}",
            f"load the model again, on the backend {backend.name}",
        )
    device = next(model.parameters()).device
    if device != backend.device.torch:
        raise ConfigError(
            f"the model is on {device}, and the backend {backend.name} on {backend.device.torch}",
            "load the model on the backend of the runner, or move it there",
        )
