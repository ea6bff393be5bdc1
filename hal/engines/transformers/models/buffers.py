"""Buffers that no checkpoint has, such as rotary frequencies: computed as transformers does after a load."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hal.engines.transformers.models.probe import REMEDY
from hal.errors import ConfigError


def fill_buffers(model: Any) -> None:
    """Compute the buffers of a model on the meta device that its checkpoint lacks, on the CPU.

    Raises:
        ConfigError: transformers does not compute one again.
    """
    owners = [(path, each) for path, each in model.named_modules() if isinstance(each, PreTrainedModel)]
    for path, module in model.named_modules():
        declared = getattr(module, "weights", None)
        stored = set(declared) if isinstance(declared, dict) else set()
        empty = [
            name for name, each in module._buffers.items() if each is not None and each.is_meta and name not in stored
        ]
        if not empty or not _is_theirs(module):
            continue
        for name in empty:
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
        if unknown := [name for name in empty if module._buffers[name].isnan().any()]:
            raise ConfigError(f"transformers does not compute {path}.{unknown[0]} again after a load", REMEDY)


def _is_theirs(module: nn.Module) -> bool:
    return not type(module).__module__.startswith("hal.")
