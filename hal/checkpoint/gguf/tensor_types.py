"""The types of tensors in GGUF files, and the reading of their values: dequantized by the package ``gguf``, or packed.

Source of the packed forms: the description of the formats in ggml. A number is ``d * (n - 8)`` in Q4_0, ``d * n + m``
in Q4_1, ``d * (n - 16)`` in Q5_0, ``d * n + m`` in Q5_1, and ``d * n`` in Q8_0.

K-quants have blocks of 256 with smaller groups: a number is ``d * s * n - e * m`` in Q4_K and Q5_K, and
``d * s * (n - 32)`` in Q6_K. ``s`` and ``m`` are six bits of each group of 32, and in Q6_K an int8 of each group of 16.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, Self

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hal.config.optional_libraries import need
from hal.errors import CheckpointError
from hal.ops.forms import Form

Part = Literal["numbers", "scales", "zero_points"]
FORMS: Final[Mapping[str, Form]] = MappingProxyType(
    {
        "Q4_0": Form("int4", columns=32),
        "Q4_1": Form("int4", columns=32, zero_points=True),
        "Q4_K": Form("int4", columns=32, zero_points=True),
        "Q5_0": Form("int8", columns=32),
        "Q5_1": Form("int8", columns=32, zero_points=True),
        "Q5_K": Form("int8", columns=32, zero_points=True),
        "Q6_K": Form("int8", columns=16),
        "Q8_0": Form("int8", columns=32),
    }
)
"""The form that weights of a type stay packed in. A minimum becomes a zero point, and 5 or 6 bits take 8."""
MIDDLES: Final = {"Q4_0": 8, "Q4_1": 8, "Q5_0": 16, "Q5_1": 16, "Q8_0": 0, "Q4_K": 8, "Q5_K": 16, "Q6_K": 32}
"""What is subtracted from a number, so that it is signed."""
WIDE: Final = ("Q4_K", "Q5_K", "Q6_K")
"""The K-quants, whose scales are products, and so float32. Others are float16."""


def part_of(name: str, raw: NDArray[np.uint8], part: Part) -> NDArray[np.generic]:
    """Return the numbers of rows, int8 ``[rows, columns]``; or the scales, or the zero points, float32, of groups.

    Args:
        name: the type, one of :data:`FORMS`.
        raw: the bytes of the rows: uint8 ``[rows, blocks, bytes of a block]``.
        part: what to return.
    """
    rows = raw.shape[0]
    scale = (_k_scales(name, raw) if name in WIDE else _half(raw[..., :2])).reshape(rows, -1)
    if not FORMS[name].zero_points:
        return scale if part == "scales" else _numbers(name, raw)
    least = (-_k_minima(raw) if name in WIDE else _half(raw[..., 2:4])).reshape(rows, -1)
    constant = scale == 0  # All numbers are the minimum: 0 minus a zero point of -1, times the minimum.
    if part == "scales":
        return np.where(constant, least, scale)
    if part == "zero_points":
        zero = -MIDDLES[name] - least.astype(np.float32) / np.where(constant, 1, scale).astype(np.float32)
        return np.asarray(np.where(constant, -1, zero), np.float32)
    numbers = _numbers(name, raw)
    return np.where(constant.repeat(FORMS[name].columns, -1), 0, numbers).astype(np.int8)


def quantized_parts(kind: str, name: str, weight: Tensor) -> dict[str, Tensor]:
    """Return the parts of ``[rows, columns]`` in a type, as ggml quantizes.

    Args:
        kind: the type, one of :data:`FORMS`.
        name: the weight's name, for errors.

    Raises:
        CheckpointError: the package does not quantize to the type.
    """
    gguf = _library()
    try:
        raw = gguf.quants.quantize(weight.float().numpy(), gguf.GGMLQuantizationType[kind])
    except NotImplementedError:
        raise CheckpointError(
            f"{name} is {weight.dtype}, and the package gguf does not quantize to the {kind} of its file",
            "load the model without quantized_weights kept, or from a file in Q4_0, Q4_1, Q5_0, Q5_1 or Q8_0",
        ) from None
    raw = raw.reshape(len(raw), -1, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1])
    parts: tuple[Part, ...] = ("numbers", "scales", "zero_points") if FORMS[kind].zero_points else ("numbers", "scales")
    with np.errstate(all="ignore"):
        return {each: torch.from_numpy(np.ascontiguousarray(part_of(kind, raw, each))) for each in parts}


def _half(raw: NDArray[np.uint8]) -> NDArray[np.generic]:
    return np.ascontiguousarray(raw).view(np.float16)


def _numbers(name: str, raw: NDArray[np.uint8]) -> NDArray[np.int8]:
    """Return signed numbers ``[rows, columns]``."""
    numbers = _k_numbers(name, raw).astype(np.int8) if name in WIDE else _simple_numbers(name, raw)
    return (numbers - MIDDLES[name]).astype(np.int8).reshape(raw.shape[0], -1)


def _simple_numbers(name: str, raw: NDArray[np.uint8]) -> NDArray[np.int8]:
    if name == "Q8_0":
        return np.ascontiguousarray(raw[..., 2:]).view(np.int8)
    halves = raw[..., -16:]
    numbers = np.concatenate((halves & 15, halves >> 4), axis=-1).astype(np.int8)
    if FORMS[name].numbers == "int8":  # the fifth bits, in four bytes before the others
        high = np.unpackbits(raw[..., -20:-16], axis=-1, bitorder="little")
        numbers |= high.astype(np.int8) << 4
    return numbers


def _k_scales(name: str, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the scales of the groups, float32 ``[rows, blocks, groups of a block]``.

    Args:
        raw: the bytes of the rows: uint8 ``[rows, blocks, bytes of a block]``.
    """
    if name == "Q6_K":
        return _half(raw[..., 208:210]).astype(np.float32) * np.ascontiguousarray(raw[..., 192:208]).view(np.int8)
    low, high = raw[..., 4:8], raw[..., 12:16]
    scales = np.concatenate((low & 63, (high & 15) | (low >> 6 << 4)), axis=-1)
    return _half(raw[..., :2]).astype(np.float32) * scales


def _k_minima(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return what is subtracted from the scaled numbers of the groups, as :func:`_k_scales` does. Q6_K has none."""
    middle, high = raw[..., 8:12], raw[..., 12:16]
    return _half(raw[..., 2:4]).astype(np.float32) * np.concatenate(
        (middle & 63, (high >> 4) | (middle >> 6 << 4)), axis=-1
    )


def _k_numbers(name: str, raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the unsigned numbers, uint8 ``[rows, blocks, 256]``."""
    if name == "Q6_K":
        low = raw[..., :128].reshape(*raw.shape[:2], 2, 2, 32)
        low = np.stack((low & 15, low >> 4), axis=-3)
        high = raw[..., 128:192].reshape(*raw.shape[:2], 2, 1, 1, 32) >> np.array([0, 2, 4, 6]).reshape(2, 2, 1) & 3
        return np.asarray(low | high.astype(np.uint8) << 4, np.uint8).reshape(*raw.shape[:2], -1)
    packed = raw[..., -128:].reshape(*raw.shape[:2], 4, 1, 32)
    found: NDArray[np.uint8] = np.concatenate((packed & 15, packed >> 4), axis=-2).reshape(*raw.shape[:2], 8, 32)
    if name == "Q5_K":
        high = raw[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
        found |= high.astype(np.uint8) << 4
    return found.reshape(*raw.shape[:2], -1)


@attrs.frozen
class TensorType:
    """A type of tensors.

    Attributes:
        name: its name, such as ``Q4_K``.
        block: the number of elements that are stored together, which are consecutive in a row.
    """

    name: str
    block: int
    nbytes: int

    @property
    def dtype(self) -> str:
        """The safetensors name of a dtype that it is computed in: bfloat16 if it is quantized."""
        return self.name if self.name in ("F32", "F16") else "BF16"


def _library() -> Any:
    return need("gguf", "gguf", "a GGUF file")


@functools.cache
def _known() -> dict[int, TensorType]:
    """Return the types that the package can dequantize, by number."""
    gguf, found = _library(), {}
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
    """Reads rows of the tensors of a file. A ``with`` block opens and closes it."""

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
            columns: the number of elements of a row.
        """
        gguf = _library()
        raw = self._raw(kind, start, first, rows, columns)
        with np.errstate(all="ignore"):  # a damaged scale is not finite
            values = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind.name])
        return torch.from_numpy(np.ascontiguousarray(values, np.float32))

    def read_part(self, part: Part, kind: TensorType, start: int, first: int, rows: int, columns: int) -> Tensor:
        """Return the numbers, scales or zero points of rows: see :func:`hal.checkpoint.gguf.tensor_types.part_of`."""
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
