"""The choice of a quantized KV cache when a model is loaded."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import torch

from hal.checkpoint.checkpoint import Checkpoint
from hal.config.settings import CacheDType
from hal.drivers.backend import Backend
from hal.errors import CheckpointError, ConfigError
from hal.nn import Attention, CausalLM

DTYPES = {"int8": torch.int8, "fp8": torch.uint8}
"""The dtypes of the numbers by ``cache.dtype``; uint8 has the bits of float8."""

KEYS, SCALES = ("key", "value"), ("key_scale", "value_scale")
"""The states of a layer's cache, and those that a quantized one has beside them."""


def quantize_cache(model: CausalLM, asked: CacheDType, checkpoint: Checkpoint) -> None:
    """Declare the states of a model's attention as a configuration or the checkpoint says.

    Args:
        model: without values; changed in place.
        asked: ``cache.dtype`` of the configuration.
        checkpoint: may have scales of keys and values.

    Raises:
        ConfigError: a quantized cache was asked for, and the model keeps no keys and values.
    """
    described = checkpoint.quantization
    stored = None if described is None else described[1].cache
    wanted = stored.dtype if asked == "auto" and stored is not None else asked
    dtype = DTYPES.get(wanted)
    layers = [each for each in model.modules() if isinstance(each, Attention)]
    if dtype is not None and not layers:
        raise ConfigError(
            f"the cache is to be kept in {wanted}, and {type(model).__name__} has no layer of hal.nn.Attention",
            "leave cache.dtype out",
        )
    scales = None if stored is None else stored.scales
    if dtype is None and scales is None:
        return
    renewed = {}
    for layer in layers:
        before = layer.states
        layer.quantize_cache(
            dtype, scales=scales, fixed=stored is not None and scales is not None and stored.dtype == wanted
        )
        renewed[id(before)] = layer.states
    model.states = [renewed.get(id(each), each) for each in model.states]


@contextmanager
def unquantized_cache(model: CausalLM) -> Iterator[None]:
    """Keep the model's keys and values in its own dtype inside the block."""
    layers = [each for each in model.modules() if isinstance(each, Attention)]
    before = [each.quantized for each in layers]
    states = model.states
    try:
        for layer in layers:
            layer.quantized = None
        if any(before):
            plain = [{name: state for name, state in each.items() if name not in SCALES} for each in states]
            model.states = [
                {name: attrs.evolve(state, dtype=None) if name in KEYS else state for name, state in each.items()}
                for each in plain
            ]
        yield
    finally:
        model.states = states
        for layer, dtype in zip(layers, before, strict=True):
            layer.quantized = dtype


def check_cache_dtype(model: CausalLM, backend: Backend) -> None:
    """Raise ConfigError unless the backend keeps the model's keys and values in the dtypes that it declares."""
    declared = {state.dtype for layer in model.states for state in layer.values()}
    for name, dtype in DTYPES.items():
        if dtype not in declared:
            continue
        remedy = 'set cache.dtype to "model"'
        if name not in backend.limits.cache_dtypes:
            others = "".join(f", or to {each!r}" for each in backend.limits.cache_dtypes)
            raise ConfigError(f"the backend {backend.name} has no kernels for a cache in {name}", remedy + others)
        if backend.state_layout != "canonical":
            raise ConfigError(
                f"the backend {backend.name} keeps its cache in the layout {backend.state_layout}, and one in {name} "
                "has the canonical layout",
                f"{remedy}, or open the backend without that layout",
            )


def check_scales(model: CausalLM) -> None:
    """Raise CheckpointError unless all scales of keys and values that the checkpoint has are positive and finite."""
    for path, layer in model.named_modules():
        if not isinstance(layer, Attention):
            continue
        for name in ("key", "value"):
            scale = getattr(layer, f"{name}_scale")
            if scale is not None and not ((value := float(scale)) > 0 and math.isfinite(value)):
                raise CheckpointError(
                    f"{path.rpartition('.')[0]}.{name[0]}_scale is {value}, not positive and finite",
                    "convert the checkpoint again, or remove its kv_cache_scheme and these scales",
                )
