"""The files of a checkpoint beside config.json: weights, tokenizer, and what the other JSON files say."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from torch import Tensor

from hal.checkpoint.hub import FOLDERS
from hal.checkpoint.safetensors_files import TensorInfo, TensorSlice, read_rows, read_slices, read_tensors
from hal.checkpoint.tokenizer_files import TOKENIZER, read_tokenizer
from hal.config.untrusted_files import is_there, read_json

COPIED = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
    "*processor_config.json",
    "generation_config.json",
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "LICENSE*",
    *FOLDERS,
)
"""Patterns of the files to copy beside new weights."""


class CheckpointFiles(ABC):
    """The files of a checkpoint, whatever they are."""

    @property
    @abstractmethod
    def has_tokenizer(self) -> bool:
        """Whether there is a tokenizer."""

    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer.

        Raises:
            CheckpointError: there is none, or it is damaged.
        """

    @abstractmethod
    def json(self, name: str) -> Mapping[str, Any]:
        """Return the content of a JSON file beside config.json; empty if there is none.

        Raises:
            CheckpointError: the file is damaged.
        """

    @abstractmethod
    def read(self, tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors, file by file, on the CPU: copy each before the next."""

    @abstractmethod
    def read_slices(
        self, wanted: Sequence[TensorSlice], tensors: Mapping[str, TensorInfo]
    ) -> Iterator[tuple[int, int, Tensor]]:
        """Yield slices; see :func:`hal.checkpoint.safetensors_files.read_slices`."""

    @abstractmethod
    def rows(self, name: str, info: TensorInfo) -> Iterator[Tensor]:
        """Yield ranges of rows of a tensor. Tensors of one shape have the same ranges."""

    @abstractmethod
    def write_beside(self, folder: Path) -> None:
        """Write the files other than weights and config.json into the folder of another checkpoint."""


class FolderFiles(CheckpointFiles):
    """The files of a folder in the layout of Hugging Face."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def has_tokenizer(self) -> bool:
        """Whether there is a tokenizer.json."""
        return is_there(self._folder / TOKENIZER)

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of tokenizer.json, with what the files beside it say, as transformers 5 reads them."""
        return read_tokenizer(self._folder)

    def json(self, name: str) -> Mapping[str, Any]:
        """Return the content of a JSON file; empty if there is none."""
        return read_json(self._folder / name) if is_there(self._folder / name) else {}

    def read(self, tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors, mapped from disk."""
        return read_tensors(tensors)

    def read_slices(
        self, wanted: Sequence[TensorSlice], tensors: Mapping[str, TensorInfo]
    ) -> Iterator[tuple[int, int, Tensor]]:
        """Yield slices, mapped from disk."""
        return read_slices(wanted, tensors)

    def rows(self, name: str, info: TensorInfo) -> Iterator[Tensor]:
        """Yield ranges of rows, mapped from disk."""
        return read_rows(name, info)

    def write_beside(self, folder: Path) -> None:
        """Copy the files."""
        for pattern in COPIED:
            for file in sorted(self._folder.glob(pattern)):
                if file.is_file():
                    copy = folder / file.relative_to(self._folder)
                    copy.parent.mkdir(exist_ok=True)
                    shutil.copyfile(file, copy)
