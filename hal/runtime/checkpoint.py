"""A checkpoint on disk, in the layout of Hugging Face: config.json, safetensors files, tokenizer.json.

Only safetensors are read. Nothing is unpickled, and no code from a checkpoint runs.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from torch import Tensor

from hal.errors import CheckpointError, nearest
from hal.quantization.description import KEYS, Quantization, read_quantization

INDEX = "model.safetensors.index.json"
REMAP_BYTES = 32 << 20
"""A file is mapped anew after so many bytes, because pages that were read count as the process's memory until then."""

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
    "I8": torch.int8, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


@attrs.frozen
class TensorInfo:
    """Where a tensor is, and its shape. Its values are read later."""

    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Its bytes on disk."""
        return math.prod(self.shape) * _DTYPES[self.dtype].itemsize

    @property
    def is_floating_point(self) -> bool:
        """Whether it holds floating-point numbers."""
        return _DTYPES[self.dtype].is_floating_point


@attrs.frozen
class Checkpoint:
    """An opened checkpoint: everything but the weights' values has been read and checked.

    Attributes:
        path: its folder.
        config: config.json.
        tensors: what the safetensors files hold, by name.
    """

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Open the folder ``path``.

        Raises:
            CheckpointError: there is no such folder, it is no checkpoint, or a file in it is damaged or unsafe.
        """
        # os.path answers for any text; pathlib raises for a path that is too long, and for an unknown user's home.
        folder = Path(os.path.expanduser(path))
        if not os.path.isdir(folder):
            found = "a file" if os.path.exists(folder) else "nothing"
            raise CheckpointError(f"no checkpoint at {folder}: found {found}", "give the path of a checkpoint's folder")
        config = _read_json(folder / "config.json")
        tensors: dict[str, TensorInfo] = {}
        for file in _weight_files(folder):
            for name, info in _inspect(file):
                if name in tensors:
                    raise CheckpointError(
                        f"{file.name} and {tensors[name].file.name} both hold {name}",
                        "remove the file that is not meant",
                    )
                tensors[name] = info
        return cls(folder, config, tensors)

    @property
    def architecture(self) -> str:
        """The architecture that config.json names."""
        architectures = self.config.get("architectures")
        if not (isinstance(architectures, list) and architectures and isinstance(architectures[0], str)):
            raise CheckpointError(
                f"{self.path / 'config.json'} names no architecture",
                'add "architectures": ["..."] as its author meant it',
            )
        return architectures[0]

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in: by config.json, or else what most bytes of floating-point tensors are held in.

        Raises:
            CheckpointError: config.json names none that there is, or one of integers.
        """
        for key in ("dtype", "torch_dtype"):
            if named := self.config.get(key):
                dtype = getattr(torch, named, None) if isinstance(named, str) else None
                if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
                    return dtype
                raise CheckpointError(
                    f"{self.path / 'config.json'} says {key} {named!r}, which is no floating-point dtype",
                    "write float32, bfloat16 or float16; or choose one yourself (dtype in the config, --dtype)",
                )
        sizes: Counter[torch.dtype] = Counter()
        for info in self.tensors.values():
            if info.is_floating_point:
                sizes[_DTYPES[info.dtype]] += info.nbytes
        return max(sizes, key=lambda kind: sizes[kind], default=torch.float32)

    @property
    def quantization(self) -> Quantization | None:
        """How the weights are quantised, by config.json or a description beside it; None if they are not.

        Raises:
            ConfigError: it is a way that hal does not read.
            CheckpointError: the description is damaged.
        """
        return read_quantization(self.path, self.config)

    @property
    def model_config(self) -> dict[str, Any]:
        """config.json as a model reads it: without what it says about quantisation, which is the loader's."""
        return {key: value for key, value in self.config.items() if key not in KEYS}

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """The tokens that end a text, by generation_config.json, or else by config.json."""
        file = self.path / "generation_config.json"
        ids = _read_json(file).get("eos_token_id") if file.exists() else None
        if ids is None:  # left out, or null
            ids = self.config.get("eos_token_id")
        listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
        if not all(type(each) is int for each in listed):
            raise CheckpointError(f"eos_token_id in {self.path} is {ids!r}", "make it a token id, or a list of them")
        return frozenset(listed)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of tokenizer.json."""
        file = self.path / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(f"{self.path} has no tokenizer.json", "save the fast tokenizer beside the weights")
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises plain Exception
            raise CheckpointError(f"{file} is not a tokenizer: {error}", "download or save it again") from None
        # Some are saved with the settings of their training; a prompt is neither cut short nor filled up.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """The values of ``names``, file by file, as CPU tensors mapped from disk: copy each before taking the next.

        Raises:
            CheckpointError: it has no tensor of a name.
        """
        by_file: dict[Path, list[str]] = {}
        for name in names:
            if name not in self.tensors:
                raise CheckpointError(f"{self.path} has no tensor {name!r}", nearest(name, self.tensors))
            by_file.setdefault(self.tensors[name].file, []).append(name)
        for file, wanted in by_file.items():
            for group in _grouped(wanted, self.tensors):
                with _opened(file) as handle:
                    for name in group:
                        yield name, handle.get_tensor(name)


def _grouped(names: list[str], tensors: Mapping[str, TensorInfo]) -> Iterator[list[str]]:
    group: list[str] = []
    size = 0
    for name in names:
        group.append(name)
        size += tensors[name].nbytes
        if size >= REMAP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{file.parent} is no checkpoint: it has no {file.name}", "give the folder that holds config.json"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}", "download or save it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds a {type(value).__name__}, not an object", "download or save it again")
    return value


def _index(folder: Path) -> Path | None:
    """The index of several files; ModelSlim names it after its own."""
    if (folder / INDEX).exists():
        return folder / INDEX
    found = sorted(folder.glob("*.safetensors.index.json"))
    if len(found) > 1:
        raise CheckpointError(
            f"{folder} holds {len(found)} indices: {', '.join(file.name for file in found)}",
            "remove those that are not meant",
        )
    return found[0] if found else None


def _weight_files(folder: Path) -> list[Path]:
    index = _index(folder)
    if index is not None:
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise CheckpointError(f"{index} has no weight_map", "download or save it again")
        names = sorted(set(weight_map.values()))
        # A name with a path in it could point anywhere on the machine.
        if outside := [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]:
            raise CheckpointError(
                f"{index.name} names {outside[0]!r}, which is no safetensors file of the folder",
                "download or save it again",
            )
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise CheckpointError(f"{folder} lacks {', '.join(missing)}, which {index.name} names", "download it again")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files
    if files:
        raise CheckpointError(
            f"{folder} holds {len(files)} safetensors files and no {INDEX}", "save it again, or add the index"
        )
    pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{folder} holds its weights as a pickle ({pickles[0]}), which can run any code when loaded",
            "convert it to safetensors on a machine that you can lose",
        )
    raise CheckpointError(
        f"{folder} is no checkpoint: it has no safetensors file", "give the folder that holds the weights"
    )


def _opened(file: Path) -> Any:
    try:
        return safe_open(str(file), framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} cannot be read: {error}", "it may be truncated; download or save it again"
        ) from None


def _inspect(file: Path) -> Iterator[tuple[str, TensorInfo]]:
    with _opened(file) as handle:
        for name in handle.keys():  # noqa: SIM118 - a safetensors handle is no mapping
            part = handle.get_slice(name)
            if part.get_dtype() not in _DTYPES:
                raise CheckpointError(
                    f"{name} in {file} is {part.get_dtype()}", f"use a checkpoint in one of {', '.join(_DTYPES)}"
                )
            yield name, TensorInfo(file, tuple(part.get_shape()), part.get_dtype())
