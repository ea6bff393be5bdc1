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
MODES = {"cls": "first", "max": "max", "mean": "mean", "lasttoken": "last"}
"""The values of the key ``pooling_mode`` of a pooling's config.json, and what they take."""
FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""The older keys, and the values of ``pooling_mode`` that they stand for."""
PRECEDING: Mapping[str, tuple[str, ...]] = {
    "Transformer": ("",),
    "Pooling": ("Transformer",),
    "Dense": ("Transformer", "Pooling", "Dense", "Normalize"),
    "Normalize": ("Transformer", "Pooling", "Dense", "Normalize"),
    "Dropout": ("Transformer", "Pooling", "Dense", "Normalize"),
}
"""The kinds of modules, and those that may stand before each. A dropout does nothing here."""
LIBRARY = "sentence_transformers."
"""The beginning of the types of modules. Others are code of the checkpoint."""
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
        include_prompt: whether the tokens of a prompt before the text count.
    """

    mode: str = "last"
    layers: tuple[Callable[[Tensor], Tensor], ...] = ()
    include_prompt: bool = True

    @classmethod
    def read(cls, folder: Path, dims: int | None = None) -> Pooling:
        """Read modules.json and what it names. Without it, the last token is taken.

        Args:
            folder: the checkpoint's folder.
            dims: how many of the first dimensions an embedding has; None for all.

        Raises:
            CheckpointError: a file is damaged, or names a module, or an option of one, that hal does not have.
        """
        file = folder / FILE
        mode, layers, include_prompt, last = "last", list[Callable[[Tensor], Tensor]](), True, ""
        for module in _modules(file) if is_there(file) else []:
            kind, path = module["type"].rpartition(".")[2], module["path"]
            if path and not is_plain_name(path):
                raise CheckpointError(
                    f"{file} names the folder {path!r:.60}, outside the checkpoint", "give a name in it"
                )
            if kind not in PRECEDING or not module["type"].startswith(LIBRARY):
                raise CheckpointError(
                    f"{file} has a module {module['type']!r:.80}, which hal does not have",
                    f"hal has {', '.join(PRECEDING)} of sentence-transformers",
                )
            if last not in PRECEDING[kind]:
                raise CheckpointError(
                    f"{file} has the module {kind} behind {last}", "give the model, one pooling, and then layers"
                )
            if kind == "Dropout":
                continue
            config, last = read_json(own) if path and is_there(own := folder / path / "config.json") else {}, kind
            if kind == "Pooling":
                mode, include_prompt = _mode(own, config), config.get("include_prompt") is not False
            elif kind == "Dense":
                layers.append(_dense(folder / path, config))
            elif kind == "Normalize":
                _check_options(own, config)
                layers.append(lambda x: functional.normalize(x, dim=-1))
        if dims is not None:
            layers.append(lambda x: x[:, :dims])
        return cls(mode, tuple(layers), include_prompt)

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


def _mode(file: Path, config: Mapping[str, Any]) -> str:
    named = config.get("pooling_mode") or [name for flag, name in FLAGS.items() if config.get(flag)] or "mean"
    chosen = named if isinstance(named, list) else [named]
    if len(chosen) != 1 or (mode := str(chosen[0]).lower()) not in MODES:
        raise CheckpointError(f"{file} asks for the pooling {named!r:.80}", f"hal has one of: {', '.join(MODES)}")
    return MODES[mode]


def _check_options(file: Path, config: Mapping[str, Any]) -> None:
    """Check the options that a layer has beside its own: what it reads and writes."""
    for name in ("module_input_name", "module_output_name", "use_residual"):
        if config.get(name) not in (None, False, "sentence_embedding"):
            raise CheckpointError(
                f"{file} says {name} {config[name]!r:.60}, which hal does not follow",
                "hal has layers that read the pooled vector alone, and write it",
            )


def _dense(folder: Path, config: Mapping[str, Any]) -> Callable[[Tensor], Tensor]:
    _check_options(folder / "config.json", config)
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
    if isinstance(stated := config.get("bias"), bool) and stated != (bias is not None):
        raise CheckpointError(
            f"{folder / 'config.json'} says bias {str(stated).lower()}, and {file.name} has "
            f"{'no' if stated else 'a'} bias",
            "correct the one that is wrong",
        )
    return lambda x: activation(functional.linear(x, weight, bias))
