"""The calls of a replay: consecutive calls of C++ kernels run as one, without Python between them."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from hal.errors import OperationError

from .launch import Launch, storage_of, tensors_of
from .native.arguments import Bindings, NativeFunction, bound, noting

Slots = ctypes.Array[ctypes.c_int64]


def replayed(launches: Sequence[Launch]) -> list[Callable[[], Any]]:
    """Return the functions that a replay calls, in order.

    A launch joins its neighbours if it only calls C++ kernels, with arguments that no replay changes: addresses,
    numbers and flags.
    """
    made: list[Callable[[], Any]] = []
    for launch in launches:
        call = launch.replayable()
        found = _noted(launch, call)
        if not found:
            made.append(call)
            continue
        joined = made[-1] if made else None
        if not isinstance(joined, NativeCalls):
            joined = NativeCalls(launch.function.__self__.library)  # type: ignore[attr-defined]
            made.append(joined)
        for function, slots in found:
            joined.append(function, slots, call)
    for each in made:
        if isinstance(each, NativeCalls):
            each.complete()
    return made


class NativeCalls:
    """Consecutive calls of C++ kernels."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._replay = bound(library, "replay", ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)
        self._calls: list[tuple[int, Slots]] = []
        self._in_python: list[Callable[[], Any]] = []
        self._table: Slots = (ctypes.c_int64 * 0)()

    def __len__(self) -> int:
        return len(self._calls)

    def append(self, function: int, slots: Slots, in_python: Callable[[], Any]) -> None:
        """Add a call of the function at an address, and the Python call that does the same, or raises its error."""
        self._calls.append((function, slots))
        self._in_python.append(in_python)

    def complete(self) -> None:
        """Make the table that C++ reads."""
        numbers = [number for function, slots in self._calls for number in (function, ctypes.addressof(slots))]
        self._table = (ctypes.c_int64 * len(numbers))(*numbers)

    def __call__(self) -> None:
        """Run the calls. One that fails is repeated in Python, which raises its error."""
        table, count = ctypes.addressof(self._table), len(self._calls)
        done = 0
        while failed := self._replay(table + 16 * done, count - done):
            done += failed
            self._in_python[done - 1]()


def _noted(launch: Launch, call: Callable[[], Any]) -> list[tuple[int, Slots]]:
    """Return the calls of C++ kernels that a launch consists of, without running them; nothing if it does more."""
    if not isinstance(getattr(launch.function, "__self__", None), Bindings) or (launch.results and not launch.fills):
        return []
    try:
        with noting() as calls, _WithoutTorch():  # type: ignore[no-untyped-call]
            call()
    except (OperationError, _ComputesInTorch):  # An operation's error: it reads values, which are not those of a step.
        return []
    found = []
    for function, arguments in calls:
        if function.replayed is None:
            return []
        found.append((function.replayed, _slots(function, arguments)))
    return found


def _slots(function: NativeFunction, arguments: Sequence[Any]) -> Slots:
    slots = []
    for kind, value in zip(function.types, arguments, strict=True):
        if kind is ctypes.c_float:
            slots.append(struct.unpack("<q", struct.pack("<fi", value, 0))[0])
        else:
            slots.append(0 if value is None else int(value))
    return (ctypes.c_int64 * len(slots))(*slots)


class _ComputesInTorch(Exception):
    pass


class _WithoutTorch(TorchDispatchMode):
    """Raises before torch writes anything, which would be what unfilled memory gives, or once it has allocated."""

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._schema.is_mutable:
            raise _ComputesInTorch
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.mkldnn.data_ptr.default:
            return result  # the address of a weight, which stays
        known = {storage_of(tensor) for tensor in tensors_of((args, kwargs))}
        made = tensors_of(result)
        if not made or any(storage_of(tensor) not in known for tensor in made):
            raise _ComputesInTorch
        return result
