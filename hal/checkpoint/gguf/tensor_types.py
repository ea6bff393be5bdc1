"""The types of tensors in GGUF files, and the reading of their values, with the package ``gguf``."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Self

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hal.checkpoint.gguf.blocks import Part, part_of
from hal.errors import CheckpointError, ConfigError


@attrs.frozen
class TensorType:
    """A type of tensors.

    Attributes:
        name: its name, such as ``Q4_K``.
        block: the number of elements that are stored together, which are consecutive in a row.
        nbytes: the bytes of a block.
    """

    name: str
    block: int
    nbytes: int

    @property
    def dtype(self) -> str:
        """The safetensors name of a dtype that it is computed in: bfloat16 if it is quantized."""
        return self.name if self.name in ("F32", "F16") else "BF16"


def require() -> Any:
    """Return the package ``gguf``.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise ConfigError(
            f"a GGUF file is read with the package gguf, which cannot be imported: {error}",
            "pip install 'torch-hal[gguf]'",
        ) from None
    return gguf


@functools.cache
def _known() -> dict[int, TensorType]:
    """Return the types that the package can dequantize, by number."""
    gguf, found = require(), {}
    for each, (block, nbytes) in gguf.GGML_QUANT_SIZES.items():
        try:
            gguf.quants.dequantize(np.zeros((1, nbytes), np.uint8), each)
        except NotImplementedError:
            continue
        found[int(each)] = TensorType(each.name, block, nbytes)
    return found


def tensor_type(number: int, what: str) -> TensorType:
    """Return the type of a number.

    Raises:
        CheckpointError: the package ``gguf`` does not know it, or cannot dequantize it.
        ConfigError: the package is not installed.
    """
    if number not in _known():
        raise CheckpointError(
            f"{what} has the type {number}, which the installed package gguf cannot dequantize",
            f"use a file in one of {', '.join(each.name for each in _known().values())}, or a newer gguf",
        )
    return _known()[number]


class Rows:
    """Reads rows of the tensors of a file. A ``with`` block opens and closes it.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Self:
        try:
            self._file = self._path.open("rb", buffering=0)
        except OSError as error:
            raise CheckpointError(f"{self._path} cannot be read: {error.strerror}", "download it again") from None
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def read(self, kind: TensorType, start: int, first: int, rows: int, columns: int) -> Tensor:
        """Return rows of a matrix, dequantized to float32: ``[rows, columns]``.

        Args:
            kind: the type of its values.
            start: the matrix's first byte in the file.
            first: the first row.
            rows: the number of rows.
            columns: the number of elements of a row.
        """
        gguf = require()
        raw = self._raw(kind, start, first, rows, columns)
        with np.errstate(all="ignore"):  # a damaged scale is not finite
            values = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind.name])
        return torch.from_numpy(np.ascontiguousarray(values, np.float32))

    def read_part(self, part: Part, kind: TensorType, start: int, first: int, rows: int, columns: int) -> Tensor:
        """Return the numbers, scales or zero points of rows: see :func:`hal.checkpoint.gguf.blocks.part_of`."""
        raw = self._raw(kind, start, first, rows, columns).reshape(rows, -1, kind.nbytes)
        with np.errstate(all="ignore"):
            return torch.from_numpy(np.ascontiguousarray(part_of(kind.name, raw, part)))

    def _raw(self, kind: TensorType, start: int, first: int, rows: int, columns: int) -> NDArray[np.uint8]:
        """Return the bytes of rows, uint8 ``[rows, bytes]``."""
        width = columns // kind.block * kind.nbytes
        data = bytearray(rows * width)  # torch takes no memory that cannot be written
        self._file.seek(start + first * width)
        if self._file.readinto(data) != len(data):
            raise CheckpointError(f"{self._path} became shorter while it was read", "download it again")
        return np.frombuffer(data, np.uint8).reshape(rows, width)
