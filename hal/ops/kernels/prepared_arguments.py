"""Kernels that want some of their arguments in another form."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import attrs
from torch import Tensor

from hal.errors import OperationError, nearest
from hal.ops.kernels.kernel_table import Kernel


@attrs.frozen
class PreparingKernel:
    """A kernel that wants some arguments in another form than the operation has them in.

    Called as it is, it prepares them at each call. A compiled step prepares each tensor once, for all that take it.

    Attributes:
        kernel: takes the operation's arguments by position, those in their other form. Must read no host values.
        prepare: by the name that ``kernel`` gives the argument, a function from the tensor to its other form, made of
            torch's operations.
        places: where those arguments stand, and their functions.

    Raises:
        OperationError: ``kernel`` has no argument of such a name.
    """

    kernel: Kernel
    prepare: Mapping[str, Callable[[Tensor], Tensor]]
    places: tuple[tuple[int, Callable[[Tensor], Tensor]], ...] = attrs.field(init=False, repr=False)

    @places.default
    def _where_they_stand(self) -> tuple[tuple[int, Callable[[Tensor], Tensor]], ...]:
        try:
            names = list(inspect.signature(self.kernel).parameters)
        except (TypeError, ValueError) as error:
            raise OperationError(
                f"the arguments of a kernel are to be prepared by name, and it tells no names: {error}",
                "call it from a Python function",
            ) from None
        for name in self.prepare:
            if name not in names:
                raise OperationError(
                    f"the argument {name!r} is to be prepared for a kernel that takes {', '.join(names)}",
                    nearest(name, names),
                )
        return tuple((names.index(name), prepare) for name, prepare in self.prepare.items())

    def __call__(self, *args: Any) -> Any:
        """The operation, on arguments as it declares them."""
        given = list(args)
        for place, prepare in self.places:
            given[place] = prepare(given[place])
        return self.kernel(*given)
