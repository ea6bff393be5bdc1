"""Embeddings: the pooling and further layers that a folder of sentence-transformers declares after the model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from hal.config.untrusted_files import is_plain_name, is_there, read_json, regular_file
from hal.errors import CheckpointError

FILE = "modules.json"
MODES = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "first",
    "pooling_mode_max_tokens": "max",
}
"""The keys of a pooling's config.json, and their modes."""
NAMES = {"lasttoken": "last", "mean": "mean", "cls": "first", "max": "max"}
"""The values of the newer key ``pooling_mode``."""
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "torch.nn.modules.linear.Identity": lambda x: x,
    "torch.nn.modules.activation.Tanh": torch.tanh,
    "torch.nn.modules.activation.ReLU": torch.relu,
    "torch.nn.modules.activation.GELU": functional.gelu,
}


@attrs.frozen(eq=False)
class Pooling:
    """How hidden states become an embedding.

    Attributes:
        mode: ``last`` or ``first`` token, or ``mean`` or ``max`` of all.
        layers: applied to the pooled vectors ``[texts, width]``, in order.
    """

    mode: str = "last"
    layers: tuple[Callable[[Tensor], Tensor], ...] = ()

    @classmethod
    def read(cls, folder: Path) -> Pooling:
        """Read modules.json and what it names. Without it, the last token is taken.

        Raises:
            CheckpointError: a file is damaged, or names a module that hal does not have.
        """
        file = folder / FILE
        if not is_there(file):
            return cls()
        mode, layers = "last", list[Callable[[Tensor], Tensor]]()
        for module in _modules(file):
            kind = module["type"].rpartition(".")[2]
            if kind == "Transformer":
                continue
            path = module["path"]
            if kind == "Normalize":
                layers.append(lambda x: functional.normalize(x, dim=-1))
            elif path and not is_plain_name(path):
                raise CheckpointError(f"{file} names the folder {path!r:.60}, outside the checkpoint", "correct it")
            elif kind == "Pooling":
                mode = _mode(folder / path / "config.json")
            elif kind == "Dense":
                layers.append(_dense(folder / path))
            else:
                raise CheckpointError(
                    f"{file} has a module {module['type']!r:.80}, which hal does not have",
                    "hal has Transformer, Pooling, Dense and Normalize",
                )
        return cls(mode, tuple(layers))

    def apply(self, pooled: Tensor) -> Tensor:
        """Return the embeddings of pooled vectors ``[texts, width]``, float32."""
        for layer in self.layers:
            pooled = layer(pooled)
        return pooled


def _modules(file: Path) -> list[dict[str, str]]:
    try:
        found: Any = json.loads(regular_file(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}", "download the checkpoint again") from None
    if not isinstance(found, list) or not all(
        isinstance(each, dict) and isinstance(each.get("type"), str) and isinstance(each.get("path"), str)
        for each in found
    ):
        raise CheckpointError(f"{file} is no list of modules with type and path", "download the checkpoint again")
    return found


def _mode(file: Path) -> str:
    config = read_json(file)
    named = config.get("pooling_mode")
    if isinstance(named, str) and named in NAMES:
        return NAMES[named]
    chosen = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    if len(chosen) != 1 or chosen[0] not in MODES:
        raise CheckpointError(
            f"{file} asks for the pooling {', '.join(chosen) or named!r:.80}", f"hal has one of: {', '.join(MODES)}"
        )
    return MODES[chosen[0]]


def _dense(folder: Path) -> Callable[[Tensor], Tensor]:
    config = read_json(folder / "config.json")
    name = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    if name not in ACTIVATIONS:
        raise CheckpointError(
            f"{folder / 'config.json'} names the activation {name!r:.80}", f"hal has: {', '.join(ACTIVATIONS)}"
        )
    file = regular_file(folder / "model.safetensors")
    try:
        tensors = {key.removeprefix("linear."): each.float() for key, each in load_file(file).items()}
        weight, bias, activation = tensors["weight"], tensors.get("bias"), ACTIVATIONS[name]
    except Exception as error:  # safetensors raises several kinds
        raise CheckpointError(f"{file} cannot be read: {error}", "download the checkpoint again") from None
    return lambda x: activation(functional.linear(x, weight, bias))
