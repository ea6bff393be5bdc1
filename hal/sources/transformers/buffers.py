"""Buffers that no checkpoint has, such as rotary frequencies: computed as transformers does after a load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hal.errors import ConfigError
from hal.sources.transformers.phase import REMEDY

DEFAULT = "default"


def fill_buffers(model: Any) -> None:
    """Compute the buffers of a model on the meta device that its checkpoint lacks, on the CPU.

    Raises:
        ConfigError: transformers does not compute one again.
    """
    for path, module in model.named_modules():
        declared = getattr(module, "weights", None)
        stored = set(declared) if isinstance(declared, dict) else set()
        empty = [
            name for name, each in module._buffers.items() if each is not None and each.is_meta and name not in stored
        ]
        if not empty or not _is_theirs(module):
            continue
        _compute(model, path, empty)
        if unknown := [name for name in empty if module._buffers[name].isnan().any()]:
            raise ConfigError(f"transformers does not compute {path}.{unknown[0]} again after a load", REMEDY)


def computed_buffer(model: Any, path: str, name: str) -> torch.Tensor:
    """Return the values of one buffer of a model on the meta device, on the CPU."""
    buffers = model.get_submodule(path)._buffers
    before = buffers[name]
    try:
        _compute(model, path, [name])
        found: torch.Tensor = buffers[name]
        return found
    finally:
        buffers[name] = before


def _compute(model: Any, path: str, names: list[str]) -> None:
    """Compute buffers of the module at ``path`` by the method of transformers that does so after a load."""
    module = model.get_submodule(path)
    owners = [(above, each) for above, each in model.named_modules() if isinstance(each, PreTrainedModel)]
    for name in names:
        old = module._buffers[name]
        module._buffers[name] = torch.zeros(old.shape, dtype=old.dtype, device="cpu")
        if old.dtype.is_floating_point:
            module._buffers[name].fill_(float("nan"))
    _, owner = max(
        ((above, each) for above, each in owners if not above or path == above or path.startswith(f"{above}.")),
        key=lambda each: len(each[0]),
    )
    with torch.device("cpu"), torch.no_grad():
        owner._init_weights(module)


def _is_theirs(module: nn.Module) -> bool:
    return not type(module).__module__.startswith("hal.")


def settle(model: nn.Module, length: int) -> None:
    """Choose the frequencies once, for texts of a length, because keys in a cache keep theirs when a text grows.

    Args:
        model: the model, with values in its buffers.
        length: the longest text, in tokens.
    """
    for module in _changing(model):
        kinds = module.rope_type if isinstance(module.rope_type, Mapping) else {None: module.rope_type}
        for layer_type, kind in kinds.items():
            if not _changes(kind):
                continue
            name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
            options = {} if layer_type is None else {"layer_type": layer_type}
            before = module._buffers[name]
            with torch.device(before.device):
                chosen, _ = ROPE_INIT_FUNCTIONS[kind](module.config, before.device, seq_len=length, **options)
            module._buffers[name] = chosen.to(before)
        module.rope_type = _held(module.rope_type)


@contextmanager
def held(model: nn.Module) -> Iterator[None]:
    """Let a model without values keep its frequencies in the block."""
    before = [(module, module.rope_type) for module in _changing(model)]
    for module, kind in before:
        module.rope_type = _held(kind)
    try:
        yield
    finally:
        for module, kind in before:
            module.rope_type = kind


def _changing(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        kind = vars(module).get("rope_type")
        if any(map(_changes, kind.values() if isinstance(kind, Mapping) else [kind])):
            yield module


def _changes(kind: Any) -> bool:
    return isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind)


def _held(kind: Any) -> Any:
    if isinstance(kind, Mapping):
        return {name: _held(each) for name, each in kind.items()}
    return DEFAULT if _changes(kind) else kind
