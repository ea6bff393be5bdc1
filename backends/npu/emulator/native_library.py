"""Bindings of the emulated CANN's functions that a real CANN lacks."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from hal.errors import DriverError


@functools.cache
def native_library() -> ctypes.CDLL:
    """Return the emulated CANN's library, with signatures for its additional functions.

    Raises:
        DriverError: the emulated CANN is not active in this process.
    """
    # The SONAME resolves to the loaded library. A real CANN has the same SONAME, but lacks these functions.
    try:
        library = ctypes.CDLL("libascendcl.so")
        library.hal_emulator_trace  # noqa: B018
    except (OSError, AttributeError) as error:
        raise DriverError(
            "the emulated CANN is not active in this process", "call emulator.activate(), or run under `hal emulate`"
        ) from error
    number, text, long = ctypes.c_int, ctypes.c_char_p, ctypes.c_int64
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "hal_emulator_set": (number, [text, text]),
        "hal_emulator_get": (long, [text]),
        "hal_emulator_trace": (None, [number]),
        "hal_emulator_trace_records": (text, []),
        "hal_emulator_arm": (number, [text, text, long, long, number, number]),
        "hal_emulator_disarm": (long, [number]),
        "hal_emulator_seed": (None, [number, ctypes.c_uint64]),
        "hal_emulator_live": (long, [text]),
        "hal_emulator_memory": (long, [number, number]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
