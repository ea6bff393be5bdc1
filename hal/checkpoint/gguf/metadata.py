"""The metadata of a GGUF file by key, with their types, and the scaling of its rotary positions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from hal.checkpoint.gguf.gguf_header import GgufTensor
from hal.checkpoint.gguf.tensor_types import Rows
from hal.errors import CheckpointError
from hal.nn.rope_parameters import Llama3Rope

T = TypeVar("T")


class Metadata:
    """Typed access to metadata.

    Args:
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


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The parameters of all published models of Llama 3.1 to 3.3. A file has only the divisors that follow from them."""


def rope_scaling(metadata: Metadata, divisors: GgufTensor | None, width: int, theta: float) -> dict[str, Any] | None:
    """Return the ``rope_scaling`` of config.json; None without scaling.

    Args:
        divisors: the tensor with a divisor of each frequency, which files of Llama 3.1 have.
        width: the number of rotated elements of a head.
        theta: the base of the frequencies.

    Raises:
        CheckpointError: hal does not have the kind of scaling, or its parameters are damaged.
    """
    kind = metadata.text(".rope.scaling.type", "none")
    if divisors is not None:
        if kind not in ("none", "llama3"):
            raise CheckpointError(f"the file has divisors of frequencies beside the scaling {kind!r:.40}", _ELSE)
        return _llama3(divisors, width, theta)
    # Older files have a factor without a type.
    factor = metadata.number(".rope.scaling.factor", metadata.number(".rope.scale_linear", 0.0))
    original = metadata.integer(".rope.scaling.original_context_length", metadata.integer(".context_length"))
    if kind == "none" and (".rope.scaling.type" in metadata or factor in (0.0, 1.0)):
        return None
    if kind not in ("none", "linear", "yarn"):
        raise CheckpointError(f"rope.scaling.type is {kind!r:.40}, which hal does not read", _ELSE)
    if factor == 0.0:
        raise CheckpointError(f"rope.scaling.type is {kind}, and there is no rope.scaling.factor", _ELSE)
    if kind != "yarn":
        return {"rope_type": "linear", "factor": factor}
    found = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    for key, name in ((".rope.scaling.yarn_beta_fast", "beta_fast"), (".rope.scaling.yarn_beta_slow", "beta_slow")):
        if key in metadata:
            found[name] = metadata.number(key)
    more = metadata.number(".rope.scaling.attn_factor", metadata.number(".rope.scaling.yarn_attn_factor", 1.0))
    if more != 1.0:  # llama.cpp multiplies by it; config.json has the product
        found["attention_factor"] = more * (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
    return found


_ELSE = "use the model's safetensors files"


def _llama3(tensor: GgufTensor, width: int, theta: float) -> dict[str, Any]:
    """Return the parameters of Llama 3's scaling that give the divisors of a file."""
    if tensor.shape != (width // 2,) or tensor.type.name != "F32":
        raise CheckpointError(
            f"rope_freqs.weight is {tensor.type.name} of the shape {[*tensor.shape]}, expected F32 of [{width // 2}]",
            "download the file again",
        )
    with Rows(tensor.file) as rows:
        given = rows.read(tensor.type, tensor.start, 0, 1, width // 2)[0]
    factor = float(given.max())
    if math.isfinite(factor) and factor >= 1.0 and theta > 1.0:
        device = torch.device("cpu")
        rope = Llama3Rope(rope_theta=theta, factor=factor, **LLAMA3)  # type: ignore[arg-type]
        plain = Llama3Rope(rope_theta=theta, factor=1.0, **LLAMA3)  # type: ignore[arg-type]
        if torch.allclose(plain.inv_freq(width, device) / rope.inv_freq(width, device), given, rtol=1e-4):
            return {"rope_type": "llama3", "factor": factor, **LLAMA3}
    raise CheckpointError("rope_freqs.weight has other divisors of frequencies than Llama 3's scaling gives", _ELSE)
