"""Validation of a kernel's signature against its operation's."""

from __future__ import annotations

import inspect
from typing import Any

from hal.errors import OperationError
from hal.ops.declaration.operation import Operation
from hal.ops.kernels.partial_kernel import PartialKernel
from hal.ops.kernels.prepared_arguments import PreparingKernel


def check_kernel(driver: str, operation: Operation, kernel: Any) -> None:
    """Raise OperationError unless a driver's kernel takes all arguments of the operation by position."""
    if not callable(kernel):
        raise OperationError(
            f"the kernel of {driver} for {operation.name} is {kernel!r}, which is not callable",
            "pass a callable, or remove the entry",
        )
    if isinstance(kernel, PartialKernel):
        if kernel.operation is not operation:
            raise OperationError(
                f"the kernel of {driver} for {operation.name} is one for {kernel.operation.name}", "correct its name"
            )
        for each in (kernel.kernel, kernel.otherwise or operation.body):
            check_kernel(driver, operation, each)
        return
    names = list(operation.signature.parameters)
    try:
        signature = inspect.signature(kernel.kernel if isinstance(kernel, PreparingKernel) else kernel)
    except (TypeError, ValueError):
        return  # a C function without a signature
    try:
        signature.bind(*names)
    except TypeError as error:
        raise OperationError(
            f"the kernel of {driver} for {operation.name} cannot take the operation's {len(names)} arguments: {error}",
            f"take them by position, in this order: {', '.join(names)}",
        ) from None
