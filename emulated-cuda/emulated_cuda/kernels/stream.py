"""Python functions as kernels: they are queued on a stream, captured in graphs, and run in stream order."""

from __future__ import annotations

import atexit
import ctypes
import itertools
import traceback
from collections.abc import Callable

import torch
from torch import Tensor

from ..libraries import RUNTIME, libraries

ASSERTED, FAILED = 710, 719
"""cudaErrorAssert and cudaErrorLaunchFailure."""

_runtime = ctypes.CDLL(str(libraries() / RUNTIME))
_numbers = itertools.count(1)
_kernels: dict[int, Callable[[], object]] = {}


def on_cpu(tensor: Tensor) -> Tensor:
    """Return a CPU tensor on the same memory, for use in a kernel."""
    made: Tensor = torch.ops.emulated_cuda.on_cpu(tensor)
    return made


def launch(name: str, kernel: Callable[[], object]) -> None:
    """Queue a kernel on the current stream. A captured kernel may run many times.

    Args:
        name: its name in graphs.
        kernel: a function without arguments or results; it accesses tensors with :func:`on_cpu`.
    """
    number = next(_numbers)
    _kernels[number] = kernel
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    error = _runtime.emulated_cuda_enqueue_numbered(stream, name.encode(), _run, _forget, ctypes.c_int64(number))
    if error:
        torch.cuda.check_error(error)


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)
def _run(number: int) -> int:
    try:
        with torch.inference_mode():
            _kernels[number]()
    except Exception as error:
        traceback.print_exc()
        return ASSERTED if isinstance(error, IndexError) else FAILED
    return 0


@ctypes.CFUNCTYPE(None, ctypes.c_int64)
def _forget(number: int) -> None:
    del _kernels[number]


@atexit.register
def _finish() -> None:
    _runtime.emulated_cuda_finish()
