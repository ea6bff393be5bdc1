"""Buffers that no checkpoint has, such as rotary frequencies: computed as transformers does after a load."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hal.engines.transformers.models.phase import REMEDY
from hal.errors import ConfigError


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
