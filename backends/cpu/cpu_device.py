"""The CPU as a device, with the functions that its floors are measured with."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from ctypes import c_int, c_int64, c_uint64, c_void_p
from functools import partial

import torch
from torch import Tensor

from hal.device.host_device import HostDevice

from .native.arguments import DTYPES, bound

SHORTEST = 0.02
"""Minimum duration of products in seconds, to make the start of threads small."""


class CpuDevice(HostDevice):
    """The host, with C++ functions that reach the highest rates of reading and of products.

    Args:
        library: the C++ kernels; None if there are none.
    """

    def __init__(self, library: ctypes.CDLL | None) -> None:
        super().__init__()
        self._library = library

    def reading(self, buffer: Tensor) -> Callable[[], object] | None:
        """Return a function that reads a tensor, in huge pages if the system provides them; None without kernels."""
        if self._library is None:
            return None
        bound(self._library, "collapse_pages", c_int, c_void_p, c_int64)(buffer.data_ptr(), buffer.nbytes)
        read = bound(self._library, "read_memory", c_uint64, c_void_p, c_int64)
        return lambda: read(buffer.data_ptr(), buffer.nbytes)

    def multiplying(self, dtype: torch.dtype) -> tuple[Callable[[], object], int] | None:
        """Return a function that multiplies in registers, and its operations; None without kernels.

        float16 is multiplied as float32, as the kernels do.
        """
        if self._library is None or dtype not in DTYPES:
            return None
        multiply = bound(self._library, "multiply_in_registers", c_int64, c_int, c_int64)
        steps, took = 1 << 16, 0.0
        while took < SHORTEST:
            steps *= 2
            start = time.perf_counter()
            operations = multiply(DTYPES[dtype], steps)
            took = time.perf_counter() - start
        return partial(multiply, DTYPES[dtype], steps), operations
