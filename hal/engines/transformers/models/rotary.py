"""Rotary frequencies that transformers chooses again in each step, by the longest sequence of the batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

DEFAULT = "default"


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
