"""Declarations of C++ functions, and checks and conversions of their arguments."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_char_p
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hal.errors import OperationError

from .prebuilt import set_of

if TYPE_CHECKING:
    from hal.nn import WeightUse

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Codes of the dtypes in C++."""


def bound(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
    """Return a function of the library with its types declared, so that ctypes checks and converts the arguments."""
    found = getattr(library, name)
    found.argtypes, found.restype = arguments, result
    return found


class NativeFunction:
    """A C++ function of a kernel, whose calls :func:`noting` can note.

    Attributes:
        replayed: the address of its variant that takes the arguments from memory; None if it has none.
        types: the arguments' types.
    """

    def __init__(self, library: ctypes.CDLL, name: str, result: Any, arguments: Sequence[Any]) -> None:
        self._call = bound(library, name, result, *arguments)
        self.types = tuple(arguments)
        variant = getattr(library, f"replay_{name}", None)
        self.replayed = None if variant is None else ctypes.cast(variant, ctypes.c_void_p).value

    def __call__(self, *arguments: Any) -> Any:
        """Call the function, or note the call while :func:`noting` does so in this thread."""
        if (noted := _noting.calls) is None:
            return self._call(*arguments)
        noted.append((self, arguments))
        return 0


class _Noting(threading.local):
    calls: list[tuple[NativeFunction, tuple[Any, ...]]] | None = None


_noting = _Noting()


@contextmanager
def noting() -> Iterator[list[tuple[NativeFunction, tuple[Any, ...]]]]:
    """Note the calls of C++ functions in this thread instead of making them; each seems to return 0."""
    _noting.calls = []
    try:
        yield _noting.calls
    finally:
        _noting.calls = None


class Bindings:
    """Kernels whose only effects are those of their C++ functions, and of torch's if they call it.

    Attributes:
        library: the C++ library.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def named(self, *details: str) -> str:
        """Return the name of a kernel in descriptions, with the highest instruction set that it was compiled for."""
        if (prebuilt := set_of(Path(self.library._name))) is not None:
            return f"C++ ({', '.join((f'prebuilt for {prebuilt}', *details))})"
        sets = bound(self.library, "instructions", c_char_p)().decode().split()
        return f"C++ ({', '.join((*sets[-1:], *details))})"

    def describe(self, weight: Tensor, use: WeightUse) -> str:
        """Return who computes an operation with a prepared weight."""
        return self.named()

    def function(self, name: str, result: Any, *arguments: Any) -> NativeFunction:
        """Return a function of the library with the types of its result and arguments."""
        return NativeFunction(self.library, name, result, arguments)


def addresses(*tensors: Tensor | None) -> list[int | None]:
    """Return the address of each tensor's elements, or None for None."""
    return [None if each is None else each.data_ptr() for each in tensors]


def rows(x: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
    """Return x with unit stride in its last dimension, and ``(rows per group, group stride, row stride)``."""
    if x.stride(-1) != 1 or x.dim() not in (2, 3):
        x = x.contiguous()
    if x.dim() == 3:
        return x, (x.shape[1], x.stride(0), x.stride(1))
    return x, (1, x.stride(0) if x.dim() == 2 else x.shape[-1], 0)


def packed(x: Tensor) -> Tensor:
    """Return x ``[tokens, heads, head_dim]`` with each token's heads contiguous."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def integers(x: Tensor, name: str) -> Tensor:
    """Return x contiguous and in int32.

    Raises:
        OperationError: a value is out of the range of int32.
    """
    if x.dtype is torch.int32:
        return x.contiguous()
    narrow = x.to(torch.int32)
    if not torch.equal(narrow.to(x.dtype), x):
        raise OperationError(f"{name} is {x.dtype} with values out of the range of int32", f"check the batch's {name}")
    return narrow.contiguous()


def empty(shape: Any, like: Tensor) -> Tensor:
    """Return a new, contiguous tensor of a dtype."""
    return torch.empty(shape, dtype=like.dtype)


def require(
    fits: bool,
    operation: str,
    *tensors: Tensor,
    indices: tuple[Tensor, ...] = (),
    dtypes: Collection[torch.dtype] = DTYPES,
) -> None:
    """Raise OperationError unless ``fits``, the first tensor's dtype is in ``dtypes``, and all are on the CPU."""
    if fits and tensors[0].dtype in dtypes and all(tensor.is_cpu for tensor in (*tensors, *indices)):
        return
    found = ", ".join(
        f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" + ("" if tensor.is_cpu else " not on the CPU")
        for tensor in (*tensors, *indices)
    )
    *others, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    raise OperationError(
        f"{operation} was given {found}",
        f"give tensors on the CPU, {', '.join(others)} or {last}, of the shapes in the operation's documentation",
    )
