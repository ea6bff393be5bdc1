"""Validation of a kernel's signature against its operation's."""

from __future__ import annotations

import inspect
from typing import Any

from hal.errors import OperationError
from hal.ops.declaration.operation import Operation
from hal.ops.kernels.form_kernels import FormKernels
from hal.ops.kernels.partial_kernel import PartialKernel
from hal.ops.kernels.prepared_arguments import PreparingKernel


def check_kernel(driver: str, operation: Operation, kernel: Any) -> None:
    """Raise OperationError unless a driver's kernel takes all arguments of the operation by position."""
    if not callable(kernel):
        raise OperationError(
            f"the kernel of {driver} for {operation.name} is {kernel!r}, which is not callable",
            "pass a callable, or remove the entry",
        )
    if isinstance(kernel, PartialKernel | FormKernels):
        if kernel.operation is not operation:
            raise OperationError(
                f"the kernel of {driver} for {operation.name} is one for {kernel.operation.name}",
                f"register it under {kernel.operation.name}",
            )
        own = [kernel.kernel] if isinstance(kernel, PartialKernel) else [each for _, each in kernel.kernels]
        for each in (*own, kernel.otherwise or operation.body):
            check_kernel(driver, operation, each)
        return
    names = list(operation.signature.parameters)
    function = kernel.kernel if isinstance(kernel, PreparingKernel) else kernel
    if _has_parameters(function, len(names)):
        return
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a C function without a signature
    try:
        signature.bind(*names)
    except TypeError as error:
        raise OperationError(
            f"the kernel of {driver} for {operation.name} cannot take the operation's {len(names)} arguments: {error}",
            f"take them by position, in this order: {', '.join(names)}",
        ) from None


def _has_parameters(function: Any, count: int) -> bool:
    """Return whether a plain function or method takes ``count`` arguments, at a tenth of the cost of a signature."""
    code = getattr(function, "__code__", None)
    if code is None or hasattr(function, "__wrapped__") or code.co_kwonlyargcount > len(function.__kwdefaults__ or ()):
        return False
    most: int = code.co_argcount - inspect.ismethod(function)
    return most - len(function.__defaults__ or ()) <= count <= most
