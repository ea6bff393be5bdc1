"""The metadata of a GGUF file by key, with the types that the keys must have."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from hal.errors import CheckpointError

T = TypeVar("T")


class Metadata:
    """Typed access to metadata.

    Args:
        path: the file, for errors.
        values: the metadata by key.

    Attributes:
        architecture: what the file calls its architecture. A key that begins with a dot is one of the architecture's.
        read: the keys that were asked for.
    """

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self._path, self._values = path, values
        self.architecture = ""
        self.read: set[str] = set()

    def integer(self, key: str, default: int | None = None) -> int:
        """Return an integer. A list with the value of each layer must have a single value."""
        value = self._found(key, default)
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]
        if type(value) is not int:
            raise self._wrong(key, value, "an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number: the shortest that the file's float32 rounds from, such as 1e-05."""
        value = self._found(key, default)
        if not isinstance(value, int | float):
            raise self._wrong(key, value, "a number")
        return float(str(np.float32(value)))

    def text(self, key: str, default: str | None = None) -> str:
        """Return a text."""
        value = self._found(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return a truth value."""
        value = self._found(key, default)
        if type(value) is not bool:
            raise self._wrong(key, value, "true or false")
        return value

    def array(self, key: str, kind: type[T], default: list[T] | None = None) -> list[T]:
        """Return a list of values of a type."""
        value = self._found(key, default)
        if not isinstance(value, list) or not all(type(each) is kind for each in value):
            raise self._wrong(key, value, f"a list of {kind.__name__}")
        return value

    def token(self, key: str) -> int | None:
        """Return the id of a token, or None."""
        return self.integer(key) if self.full(key) in self._values else None

    def raw(self, key: str) -> Any:
        """Return a value as it is, or None."""
        return self._values.get(self.full(key))

    def full(self, key: str) -> str:
        """Return a key with the architecture's name."""
        return self.architecture + key if key.startswith(".") else key

    def __contains__(self, key: str) -> bool:
        return self.full(key) in self._values

    def unread(self) -> list[str]:
        """Return the architecture's keys that were not asked for."""
        return sorted(key for key in self._values if key.startswith(f"{self.architecture}.") and key not in self.read)

    def _found(self, key: str, default: Any) -> Any:
        key = self.full(key)
        self.read.add(key)
        value = self._values.get(key, default)
        if value is None:
            raise CheckpointError(f"{self._path} has no {key}", "convert the model again with a current llama.cpp")
        return value

    def _wrong(self, key: str, value: Any, expected: str) -> CheckpointError:
        return CheckpointError(
            f"{self.full(key)} in {self._path} is {value!r:.60}, expected {expected}", "download the file again"
        )
