"""The kernels with ``numerics.invariant``: those that a driver declares, and what takes the place of others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from hal import ops
from hal.errors import MissingKernel
from hal.ops.declaration.operation import Operation
from hal.ops.kernels.kernel_table import Kernel
from hal.ops.kernels.part_of_call import row_by_row
from hal.ops.kernels.partial_kernel import FormKernels, PartialKernel


def invariant_kernels(backend: str, kernels: Mapping[str, Kernel], declared: Mapping[str, Kernel]) -> dict[str, Kernel]:
    """Return the kernels by operation name.

    A kernel that is not declared is called for one row at a time, or refuses its calls. A fused operation without a
    declared kernel has none, so that its smaller operations run.

    Args:
        backend: the backend's name.
        kernels: all its kernels.
        declared: those that its driver declares invariant.
    """
    found: dict[str, Kernel] = {}
    for name in {**kernels, **declared}:
        operation, held = ops.operation(name), declared.get(name)
        if held is None:
            if not operation.fused:
                found[name] = invariant_kernel(backend, operation, kernels[name])
        elif isinstance(held, FormKernels | PartialKernel) and held.otherwise is None:
            other = invariant_kernel(backend, operation, kernels.get(name))
            found[name] = attrs.evolve(held, operation=name, otherwise=other)
        else:
            found[name] = held
    return found


def invariant_kernel(backend: str, operation: Operation, kernel: Kernel | None) -> Kernel:
    """Return a kernel that calls another one, or the reference, for each row, or one that refuses its calls."""
    name = "the reference" if kernel is None else named(kernel)
    if isinstance(kernel, FormKernels | PartialKernel):
        kernel = kernel.bound(operation.reference)
    found = row_by_row(operation, kernel or operation.reference)
    if found is not None:
        return found

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise MissingKernel(
            f"numerics.invariant is true, but {backend} computes {operation.name} with {name}, whose result for a "
            "token may depend on other tokens of the step",
            "set numerics.invariant to false, or choose a driver that declares an invariant kernel",
        )

    return refuse


def named(kernel: Kernel) -> str:
    """Return the name of a kernel for messages."""
    if isinstance(kernel, FormKernels):
        return " or ".join(dict.fromkeys(named(each) for _, each in kernel.kernels))
    inner = getattr(kernel, "kernel", kernel)
    return str(getattr(inner, "__qualname__", type(inner).__qualname__))
