"""Kernels that want some of their arguments in another form."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import attrs
from torch import Tensor

from hal.ops.declaration import Kernel


@attrs.frozen
class PreparingKernel:
    """A kernel that wants some arguments in another form than the operation has them in.

    Called as it is, it prepares them at each call. A compiled step prepares each tensor once, for all that take it.

    Attributes:
        kernel: takes the operation's arguments by position, those in their other form. Must read no host values.
        prepare: by argument name, a function from the tensor to its other form, made of torch's operations.
    """

    kernel: Kernel
    prepare: Mapping[str, Callable[[Tensor], Tensor]]
    _places: tuple[tuple[int, Callable[[Tensor], Tensor]], ...] = attrs.field(init=False)

    @_places.default
    def _where_they_stand(self) -> tuple[tuple[int, Callable[[Tensor], Tensor]], ...]:
        names = list(inspect.signature(self.kernel).parameters)
        return tuple((names.index(name), prepare) for name, prepare in self.prepare.items())

    def __call__(self, *args: Any) -> Any:
        """The operation, on arguments as it declares them."""
        given = list(args)
        for place, prepare in self._places:
            given[place] = prepare(given[place])
        return self.kernel(*given)
