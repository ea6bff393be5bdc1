"""Kernels that need some arguments in another form, and validation of every kernel's signature."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import attrs
from torch import Tensor

from hal.errors import OperationError, nearest
from hal.ops.declaration.operation import Operation
from hal.ops.kernels.kernel_table import Kernel
from hal.ops.kernels.partial_kernel import FormKernels, PartialKernel


@attrs.frozen
class PreparingKernel:
    """A kernel that needs some arguments in another form than the operation's.

    A direct call prepares them each time. A compiled step prepares each tensor once, for all kernels that use it.

    Attributes:
        kernel: takes the operation's arguments by position, with the prepared ones in their other form. It must not
            read host values.
        prepare: functions from a tensor to its other form, in torch operations, by the kernel's argument name. An
            argument that is None stays None. Further parameters of a function are names of the kernel's arguments,
            which it may read unless the kernel writes them.
        places: the positions of these arguments, their functions, and the positions of all that each is given.

    Raises:
        OperationError: ``kernel`` has no argument of such a name.
    """

    kernel: Kernel
    prepare: Mapping[str, Callable[..., Tensor]]
    places: tuple[tuple[int, Callable[..., Tensor], tuple[int, ...]], ...] = attrs.field(init=False, repr=False)

    @places.default
    def _where_they_stand(self) -> tuple[tuple[int, Callable[..., Tensor], tuple[int, ...]], ...]:
        try:
            names = list(inspect.signature(self.kernel).parameters)
        except (TypeError, ValueError) as error:
            raise OperationError(
                f"a kernel whose arguments are prepared by name has no signature: {error}",
                "wrap the kernel in a Python function",
            ) from None
        given = {name: [name, *_further_parameters(prepare)] for name, prepare in self.prepare.items()}
        for name in itertools.chain(*given.values()):
            if name not in names:
                raise OperationError(
                    f"prepare has the argument {name!r}, but the kernel takes {', '.join(names)}", nearest(name, names)
                )
        return tuple(
            (names.index(name), prepare, tuple(map(names.index, given[name]))) for name, prepare in self.prepare.items()
        )

    def __call__(self, *args: Any) -> Any:
        """Run the operation on unprepared arguments."""
        given = list(args)
        for place, prepare, sources in self.places:
            if given[place] is not None:
                given[place] = prepare(*(args[source] for source in sources))
        return self.kernel(*given)


def _further_parameters(function: Callable[..., Tensor]) -> list[str]:
    """Return the names of a function's parameters after the first; none of a function without a signature."""
    try:
        return list(inspect.signature(function).parameters)[1:]
    except (TypeError, ValueError):  # such as a method of Tensor
        return []


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
