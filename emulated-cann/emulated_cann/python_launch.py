"""Launches of kernels that are functions in Python, such as Triton's interpreter runs."""

from __future__ import annotations

import ctypes
import itertools
import logging
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from .control import native_library
from .errors import EmulationError

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("emulated_cann")
_bodies: dict[int, Callable[[], object]] = {}
_numbers = itertools.count()
_DTYPES = {"float32": 0, "float16": 1, "int8": 2, "int32": 3, "uint8": 4, "int64": 9, "bool": 12, "bfloat16": 27}
"""aclDataType by the name of torch's."""


class _Operand(ctypes.Structure):
    _fields_ = (
        ("address", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("written", ctypes.c_int),
        ("dtype", ctypes.c_int),
        ("dims", ctypes.c_int),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
    )


def _run(number: int) -> int:
    try:
        _bodies[number]()
    except Exception:
        log.exception("a kernel in Python failed")
        return 1
    return 0


_CALLED = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)(_run)


def launch(kernel: str, function: Callable[..., object], *arguments: Any, written: Collection[Tensor]) -> None:
    """Launch a kernel on the current stream that calls ``function(*arguments)`` with CPU tensors over device memory.

    It is one launch in traces, captures and replays. The function runs on the stream's thread, with Python's lock.

    Args:
        kernel: the kernel's name.
        function: computes the result and writes it in place. A replay calls it again, so it must not change anything
            else. An exception is logged, and becomes an error of the device.
        arguments: what the function gets; tensors of the current NPU, and other values unchanged.
        written: those of the tensors that the function writes.

    Raises:
        EmulationError: the emulated CANN is not active, or refuses the launch.
    """
    import torch

    native = native_library()
    while (ended := native.emulated_cann_dropped()) >= 0:
        del _bodies[ended]
    on_device = [each for each in arguments if isinstance(each, torch.Tensor)]
    views = iter([_host_view(native, each) for each in on_device])
    given = [next(views) if isinstance(each, torch.Tensor) else each for each in arguments]
    number = next(_numbers)
    _bodies[number] = lambda: function(*given)
    operands = _operands(on_device, written)
    # Reading the handle waits until torch_npu's task queue has launched what came before.
    stream = torch.npu.current_stream().npu_stream  # type: ignore[attr-defined]
    if code := native.emulated_cann_launch(stream, kernel.encode(), operands, len(operands), _CALLED, number):
        raise EmulationError(f"the launch of {kernel} was refused with code {code}", "read the previous error")


def _span(tensor: Tensor) -> int:
    """Return the bytes from a tensor's first element to its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0


def _operands(tensors: Sequence[Tensor], written: Collection[Tensor]) -> Any:
    operands = (_Operand * len(tensors))()
    for operand, each in zip(operands, tensors, strict=True):
        dtype = _DTYPES[str(each.dtype).removeprefix("torch.")]
        shape = (ctypes.c_int64 * each.dim())(*each.shape)
        operand.address, operand.bytes = each.data_ptr(), _span(each)
        operand.written = any(each is one for one in written)
        operand.dtype, operand.dims, operand.shape = dtype, each.dim(), shape
    return operands


def _host_view(native: ctypes.CDLL, tensor: Tensor) -> Tensor:
    import torch

    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    memory = (ctypes.c_char * _span(tensor)).from_address(native.emulated_cann_backing(tensor.data_ptr()))
    flat = torch.frombuffer(memory, dtype=tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride())
