"""Kernels that need some arguments in another form."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import attrs
from torch import Tensor

from hal.errors import OperationError, nearest
from hal.ops.kernels.kernel_table import Kernel


@attrs.frozen
class PreparingKernel:
    """A kernel that needs some arguments in another form than the operation's.

    A direct call prepares them each time. A compiled step prepares each tensor once, for all kernels that use it.

    Attributes:
        kernel: takes the operation's arguments by position, with the prepared ones in their other form. It must not
            read host values.
        prepare: functions from a tensor to its other form, in torch operations, by the kernel's argument name. An
            argument that is None stays None. Further parameters of a function are names of the kernel's arguments,
            whose shapes it may read.
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
