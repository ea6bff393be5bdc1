"""The header of a GGUF file: metadata, and the place of each tensor. Nothing else of the file is read.

A file is input from strangers. Every length and offset is compared with the file's size before it is used.

Source: the specification of GGUF, ``docs/gguf.md`` of the project ggml, versions 2 and 3.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from hal.checkpoint.gguf.tensor_types import TensorType, tensor_type
from hal.config.untrusted_files import AGAIN, format_name, is_there, regular_file
from hal.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
HEADER_BYTES = 1 << 26
"""The most bytes of metadata and descriptions of tensors. A vocabulary of 262,144 tokens takes some 7 MB."""
KEYS, TENSORS, SPLITS = 1 << 12, 1 << 20, 1 << 10
"""The most keys, tensors and files of a model."""
DIMENSIONS = 4
STRING, ARRAY, UINT32 = 8, 9, 4
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The codes of the module struct, by the types of metadata values."""
SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@attrs.frozen
class GgufTensor:
    """The place of a tensor.

    Attributes:
        type: how its values are stored.
        shape: the outermost dimension first, in torch's order.
        start: the first byte in the file.
    """

    file: Path
    type: TensorType
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


@attrs.frozen
class GgufHeader:
    """The header of a model's file or files.

    Attributes:
        path: the file, the first if there are several.
        metadata: the metadata of the first file, by key.
        tensors: the tensors of all files, by name.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @classmethod
    def open(cls, path: Path) -> GgufHeader:
        """Read the header of a file, and those of the other files of a split model.

        Raises:
            CheckpointError: a file is missing, damaged, or of a kind that hal does not read.
        """
        paths = _files(path)
        headers = [_Header(each).read() for each in paths]
        metadata, tensors = headers[0]
        declared = metadata.get("split.count", 1)
        if declared not in ((0, 1) if len(paths) == 1 else (len(paths),)):
            raise CheckpointError(
                f"{paths[0]} is one of {declared!r:.20} files, and its name says {len(paths)}",
                "keep the published names, such as model-00001-of-00003.gguf",
            )
        for file, (_, more) in zip(paths[1:], headers[1:], strict=True):
            if twice := sorted(tensors.keys() & more.keys()):
                raise CheckpointError(f"{file} has {twice[0]}, which another file of the model has", AGAIN)
            tensors |= more
        total = metadata.get("split.tensors.count", len(tensors))
        if total != len(tensors):
            raise CheckpointError(f"{paths[0]} declares {total!r:.20} tensors, and there are {len(tensors)}", AGAIN)
        return cls(paths[0], metadata, tensors)


def is_gguf(path: Path) -> bool:
    """Return whether a file is named as a GGUF file, or begins as one."""
    if path.suffix.lower() == ".gguf":
        return True
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except (OSError, ValueError):
        return False


def _files(path: Path) -> list[Path]:
    """Return the files of the model that ``path`` is a part of, in order."""
    found = SPLIT.fullmatch(path.name)
    if found is None:
        return [path]
    count = int(found["count"])
    if not 1 <= int(found["number"]) <= count <= SPLITS:
        raise CheckpointError(f"{path} is named as one of {count} files", f"give one of 1 to {SPLITS} files")
    paths = [path.with_name(f"{found['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    for each in paths:
        if not is_there(each):
            raise CheckpointError(
                f"{path} is one of {count} files, and {each.name} is missing", f"download it to {path.parent}"
            )
    return paths


class _Header:
    """Reads the header of one file."""

    def __init__(self, path: Path) -> None:
        self._path, self._place = path, 0
        self._data: Any = b""
        self._end = 0

    def read(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        """Return the metadata and the tensors."""
        regular_file(self._path)
        try:
            with self._path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                self._data, self._end = data, min(len(data), HEADER_BYTES)
                try:
                    return self._content(len(data))
                finally:
                    self._data = b""
        except (OSError, ValueError) as error:  # an empty file cannot be mapped
            raise self._damaged(str(error)) from None

    def _content(self, size: int) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        begin = bytes(self._data[:8])
        if begin[:4] != MAGIC:
            raise CheckpointError(f"{self._path} is no GGUF file: it begins with {begin[:4]!r}, not {MAGIC!r}", AGAIN)
        self._place = 4
        version = self._number(UINT32)
        if version not in VERSIONS:
            swapped = int.from_bytes(begin[4:8], "big") in VERSIONS
            raise CheckpointError(
                f"{self._path} is GGUF version {version}" if not swapped else f"{self._path} is a big-endian GGUF file",
                "hal reads version 2 and 3, little-endian: convert the model again with a current llama.cpp",
            )
        tensors, keys = self._number(10), self._number(10)
        self._limit(tensors, TENSORS, "tensors")
        self._limit(keys, KEYS, "keys")
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self._text()
            if key in metadata:
                raise self._damaged(f"the key {format_name(key)} occurs twice")
            metadata[key] = self._value(key, self._number(UINT32))
        described = dict(self._described(tensors))
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 1 << 16 or alignment & (alignment - 1):
            raise self._damaged(f"general.alignment is {alignment!r:.40}")
        data = -(-self._place // alignment) * alignment
        return metadata, {
            name: self._placed(name, shape, kind, data, offset, size)
            for name, (shape, kind, offset) in described.items()
        }

    def _described(self, count: int) -> Iterator[tuple[str, tuple[tuple[int, ...], int, int]]]:
        names = set()
        for _ in range(count):
            name, dimensions = self._text(), self._number(UINT32)
            if name in names:
                raise self._damaged(f"the tensor {format_name(name)} occurs twice")
            names.add(name)
            if not 1 <= dimensions <= DIMENSIONS:
                raise self._damaged(f"the tensor {format_name(name)} has {dimensions} dimensions")
            shape = tuple(self._number(10) for _ in range(dimensions))[::-1]
            yield name, (shape, self._number(UINT32), self._number(10))

    def _placed(self, name: str, shape: tuple[int, ...], kind: int, data: int, offset: int, size: int) -> GgufTensor:
        stored = tensor_type(kind, f"{format_name(name)} in {self._path}")
        if min(shape) < 1 or shape[-1] % stored.block:
            raise self._damaged(
                f"the tensor {format_name(name)} has the shape {[*shape]}, "
                f"and {stored.name} has blocks of {stored.block}"
            )
        nbytes = math.prod(shape) // stored.block * stored.nbytes
        if data + offset + nbytes > size:
            raise self._damaged(
                f"the tensor {format_name(name)} takes {nbytes} bytes from byte {data + offset}, "
                f"and the file has {size}"
            )
        return GgufTensor(self._path, stored, shape, data + offset)

    def _take(self, count: int) -> int:
        """Return the place of the next ``count`` bytes, and go on after them."""
        start, self._place = self._place, self._place + count
        if self._place > self._end:
            limit = " or its metadata are too large" if self._end == HEADER_BYTES else ""
            raise self._damaged(f"its header needs more than {self._end} bytes: it is truncated{limit}")
        return start

    def _number(self, kind: int) -> Any:
        code = "<" + NUMBERS[kind]
        return struct.unpack_from(code, self._data, self._take(struct.calcsize(code)))[0]

    def _text(self) -> str:
        length = self._number(10)
        start = self._take(length)
        try:
            return str(self._data[start : start + length], "utf-8")
        except UnicodeDecodeError as error:
            raise self._damaged(f"the text at byte {start} is not UTF-8: {error.reason}") from None

    def _value(self, key: str, kind: int) -> Any:
        if kind == STRING:
            return self._text()
        if kind in NUMBERS:
            value = self._number(kind)
            if isinstance(value, float) and not math.isfinite(value):
                raise self._damaged(f"{format_name(key)} is {value}")
            return value
        if kind != ARRAY:
            raise self._damaged(f"{format_name(key)} has a value of the unknown type {kind}")
        inner, count = self._number(UINT32), self._number(10)
        if inner == STRING:
            self._limit(count, (self._end - self._place) // 8, f"texts in {format_name(key)}")
            return [self._text() for _ in range(count)]
        if inner not in NUMBERS:
            kinds = "arrays" if inner == ARRAY else f"values of the unknown type {inner}"
            raise self._damaged(f"{format_name(key)} is an array of {kinds}")
        code = "<" + NUMBERS[inner]
        start = self._take(count * struct.calcsize(code))
        return np.frombuffer(self._data[start : self._place], dtype=np.dtype(code)).tolist()

    def _limit(self, count: int, most: int, what: str) -> None:
        if count > most:
            raise self._damaged(f"it declares {count} {what}, and can have {most}")

    def _damaged(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self._path} cannot be read: {problem}", f"it may be truncated; {AGAIN}")
