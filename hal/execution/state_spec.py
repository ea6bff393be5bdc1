"""The states that a runner allocates for its model, and the check that they fit into the device's memory."""

from __future__ import annotations

import gc
import math

from hal.drivers.backend import Backend
from hal.errors import ConfigError
from hal.nn import CausalLM
from hal.step import StateSpec
from hal.step.dummies import DUMMY_BLOCK, DUMMY_SLOT
from hal.step.state import SEQUENCE


def spec_of(model: CausalLM, backend: Backend) -> StateSpec:
    """Return the specification of a model's states, for the tokens and sequences that the backend's config sets."""
    cache = backend.config.cache
    in_slots = [name for layer in model.states for name, state in layer.items() if state.per is SEQUENCE]
    if in_slots and cache.reuse_prefixes:
        raise ConfigError(
            f"cache.reuse_prefixes is set, but {type(model).__name__} keeps {in_slots[0]} per sequence, which "
            "sequences cannot share",
            "leave cache.reuse_prefixes out for this model",
        )
    return StateSpec(
        tuple(model.states),
        dtype=next(model.parameters()).dtype,
        num_blocks=math.ceil(cache.num_tokens / backend.block_size) + DUMMY_BLOCK + 1,
        block_size=backend.block_size,
        num_slots=cache.num_sequences + DUMMY_SLOT + 1 if in_slots else 0,
    )


def check_fits(spec: StateSpec, backend: Backend) -> None:
    """Raise ConfigError unless the states fit the free memory of the backend's device."""
    free = backend.device.memory_stats().free
    if spec.nbytes > free:
        gc.collect()  # An unused runner may still hold memory: traces leave reference cycles.
        backend.device.empty_cache()
        free = backend.device.memory_stats().free
    if spec.nbytes > free:
        raise ConfigError(
            f"a cache of {spec.num_tokens} tokens takes {spec.nbytes >> 20} MiB of {free >> 20} MiB free",
            "lower cache.num_tokens",
        )
