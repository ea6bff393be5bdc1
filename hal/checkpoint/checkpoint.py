"""A checkpoint: a folder in the layout of Hugging Face (config.json, safetensors, tokenizer.json), or a GGUF file.

hal unpickles nothing, and runs no code from a checkpoint.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from tokenizers import Tokenizer
from torch import Tensor

from hal.checkpoint import hub
from hal.checkpoint.checkpoint_files import CheckpointFiles, FolderFiles
from hal.checkpoint.gguf.gguf_files import GgufFiles
from hal.checkpoint.gguf.gguf_header import is_gguf
from hal.checkpoint.other_formats import no_folder, no_safetensors
from hal.checkpoint.safetensors_files import (
    DTYPES,
    TensorInfo,
    TensorSlice,
    tensors_of,
    weight_files,
)
from hal.config.untrusted_files import is_there, read_json
from hal.errors import CheckpointError, nearest
from hal.quantization.checkpoint_format import CheckpointFormat, Quantization, config_keys, read_quantization


@attrs.frozen
class Checkpoint:
    """An opened checkpoint. Everything except the values of the weights has been read and validated.

    Attributes:
        path: the folder, or the GGUF file.
        config: the content of config.json, or what a GGUF file's metadata say under the same keys.
        tensors: the tensors of the weights, by name.
        files: reads the weights, the tokenizer and the other files.
    """

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    files: CheckpointFiles = attrs.field(
        default=attrs.Factory(lambda self: FolderFiles(self.path), takes_self=True), eq=False, repr=False
    )

    @classmethod
    def open(cls, path: str | Path, *, revision: str | None = None) -> Checkpoint:
        """Open a folder, a GGUF file, or a model of the Hugging Face Hub, which is downloaded; see
        :func:`hal.checkpoint.hub.download`.

        Args:
            path: the folder or file; or, where there is none of that path, a name such as ``Qwen/Qwen3-0.6B``.
            revision: the branch, tag or commit of a model of the hub; None for its main branch.

        Raises:
            CheckpointError: the folder does not exist or is no checkpoint, a file in it is damaged or unsafe, or the
                model cannot be downloaded.
            ConfigError: the path is a GGUF file, and the package ``gguf`` is not installed.
        """
        folder = hub.folder_of(path, revision)
        if os.path.isfile(folder) and is_gguf(folder):
            files = GgufFiles(folder)
            return cls(files.path, files.config, files.tensors, files)
        if not os.path.isdir(folder):
            raise no_folder(folder)
        if not is_there(folder / "config.json"):
            raise no_safetensors(folder)
        config = read_json(folder / "config.json")
        tensors: dict[str, TensorInfo] = {}
        for file in weight_files(folder):
            for name, info in tensors_of(file):
                if name in tensors:
                    raise CheckpointError(
                        f"{file.name} and {tensors[name].file.name} both hold {name}", "remove the obsolete file"
                    )
                tensors[name] = info
        return cls(folder, config, tensors)

    @property
    def architecture(self) -> str:
        """The architecture in config.json."""
        architectures = self.config.get("architectures")
        if not (isinstance(architectures, list) and architectures and isinstance(architectures[0], str)):
            raise CheckpointError(
                f"{self.path / 'config.json'} names no architecture",
                'add "architectures": ["..."] with the name of its model class',
            )
        return architectures[0]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in config.json, or else the dtype of most bytes of floating-point tensors.

        Raises:
            CheckpointError: config.json names an unknown dtype, or one of integers.
        """
        for key in ("dtype", "torch_dtype"):
            if (named := self.config.get(key)) is not None:
                dtype = getattr(torch, named, None) if isinstance(named, str) else None
                if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
                    return dtype
                raise CheckpointError(
                    f"{self.path / 'config.json'} says {key} {named!r:.60}, which is no floating-point dtype",
                    "write float32, bfloat16 or float16; or set dtype in the config, or --dtype",
                )
        sizes: Counter[torch.dtype] = Counter()
        for info in self.tensors.values():
            if info.is_floating_point:
                sizes[DTYPES[info.dtype]] += info.nbytes
        return max(sizes, key=lambda kind: sizes[kind], default=torch.float32)

    @property
    def quantization(self) -> tuple[CheckpointFormat, Quantization] | None:
        """The format and the quantization of the weights, from config.json or a file beside it; None if unquantized.

        Raises:
            ConfigError: hal does not support it.
            CheckpointError: the file is damaged.
        """
        return read_quantization(self.path, self.config)

    @property
    def model_config(self) -> dict[str, Any]:
        """The content of config.json without the quantization keys, which only the loader reads."""
        keys = config_keys()
        return {key: value for key, value in self.config.items() if key not in keys}

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """The tokens that end a text, from generation_config.json, or else from config.json.

        Raises:
            CheckpointError: the file is damaged, or the value is not a token id or a list of them.
        """
        ids = self.files.json("generation_config.json").get("eos_token_id")
        if ids is None:  # The key is missing, or null.
            ids = self.config.get("eos_token_id")
        listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
        if not all(type(each) is int for each in listed):
            raise CheckpointError(
                f"eos_token_id in {self.path} is {ids!r:.60}", "make it a token id, or a list of them"
            )
        return frozenset(listed)

    @property
    def has_tokenizer(self) -> bool:
        """Whether there is a tokenizer: a tokenizer.json, or the vocabulary of a GGUF file."""
        return self.files.has_tokenizer

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of tokenizer.json, with what the files beside it say, as transformers 5 reads them; or
        the one that a GGUF file's metadata describe.

        Raises:
            CheckpointError: there is none, or a file is damaged.
        """
        return self.files.tokenizer()

    def equal(self, first: str, second: str, dtype: torch.dtype) -> bool:
        """Return whether two tensors of one shape hold the same values, rounded to a dtype."""
        pairs = zip(*(self.files.rows(name, self.tensors[name]) for name in (first, second)), strict=True)
        return all(torch.equal(ours.to(dtype), theirs.to(dtype)) for ours, theirs in pairs)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the values of ``names``, file by file, as CPU tensors: copy each before the next.

        Raises:
            CheckpointError: the checkpoint has no tensor of a name.
        """
        names = list(names)
        self._check_names(names)
        return self.files.read({name: self.tensors[name] for name in names})

    def read_slices(self, wanted: Sequence[TensorSlice]) -> Iterator[tuple[int, int, Tensor]]:
        """Read slices, file by file; see :func:`hal.checkpoint.safetensors_files.read_slices`.

        Raises:
            CheckpointError: the checkpoint has no tensor of a name.
        """
        self._check_names(each.name for each in wanted)
        return self.files.read_slices(wanted, self.tensors)

    def _check_names(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.tensors:
                raise CheckpointError(f"{self.path} has no tensor {name!r}", nearest(name, self.tensors))
