"""Whether a kernel can be called as its operation is."""

from __future__ import annotations

import inspect
from typing import Any

from hal.errors import OperationError
from hal.ops.declaration.operation import Operation
from hal.ops.kernels.prepared_arguments import PreparingKernel


def check_kernel(driver: str, operation: Operation, kernel: Any) -> None:
    """Raise OperationError unless a driver's kernel takes all the operation's arguments, by position."""
    if not callable(kernel):
        raise OperationError(
            f"the kernel of {driver} for {operation.name} is {kernel!r}", "give a callable, or leave it out"
        )
    names = list(operation.signature.parameters)
    try:
        signature = inspect.signature(kernel.kernel if isinstance(kernel, PreparingKernel) else kernel)
    except (TypeError, ValueError):
        return  # a function in C, which does not tell
    try:
        signature.bind(*names)
    except TypeError as error:
        raise OperationError(
            f"the kernel of {driver} for {operation.name} cannot take the operation's {len(names)} arguments: {error}",
            f"take them by position, in this order: {', '.join(names)}",
        ) from None
