"""A function that is stopped wherever it calls certain operations, and goes on later, in a greenlet."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextvars import copy_context
from typing import Any

import attrs
from greenlet import GreenletExit, getcurrent, greenlet  # type: ignore[import-untyped]
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter

from hal import ops
from hal.errors import CaptureError
from hal.ops.binding import Kernel
from hal.ops.declaration import Operation


@attrs.frozen
class Call:
    """A call of a splitting operation that the model is waiting for."""

    operation: Operation
    arguments: dict[str, Any]


class Stopping:
    """Runs a function up to each call of a splitting operation, in the capture that is under way.

    Args:
        function: gives logits.
        at: names of the splitting operations.
        fields: of the batch, by the tensors' ids, that nothing else may read.
    """

    def __init__(self, function: Callable[[], Tensor], at: Collection[str], fields: Mapping[int, str]) -> None:
        self._greenlet = greenlet(lambda _: function())
        self._parent = getcurrent()
        self._at, self._fields = at, fields
        self.call: Call | None = None

    def resume(self, given: Any, names: Collection[str]) -> Any:
        """Go on, with what the call that was waited for gives.

        Returns:
            The tensors that the next call takes as ``names``, or logits.
        """
        self.call = None
        with ops.intercepted(self._wrap), _Guard(self._refuse):
            self._greenlet.gr_context = copy_context()  # a greenlet has one of its own, which knows no interception
            found = self._greenlet.switch(given)
        if not isinstance(found, Call):
            return found
        self.call = found
        # Tensors of their own, as the model's belong to the model.
        return {name: each.detach() for name, each in found.arguments.items() if name in names}

    def stop(self) -> None:
        """Leave the function where it is, for good."""
        self.call = None
        if not self._greenlet.dead:
            self._greenlet.throw(GreenletExit)

    def _wrap(self, operation: Operation, kernel: Kernel) -> Kernel:
        if operation.name in self._at:
            return lambda *args, **kwargs: self._parent.switch(Call(operation, operation.arguments(args, kwargs)))

        def checked(*args: Any, **kwargs: Any) -> Any:
            self._refuse(operation.name, (*args, *kwargs.values()))
            return kernel(*args, **kwargs)

        return checked

    def _refuse(self, name: str, arguments: Iterable[Any]) -> None:
        for each in arguments:
            if id(each) in self._fields:
                raise CaptureError(
                    f"{name} reads batch.{self._fields[id(each)]}, whose shape changes from step to step, in a capture",
                    f'name {name} in splitting_ops if it is an operation, or use the compiler "piecewise"',
                )


class _Guard(TorchFunctionMode):
    """Shows every function's arguments to ``refuse``."""

    def __init__(self, refuse: Callable[[str, Iterable[Any]], None]) -> None:
        super().__init__()
        self._refuse = refuse

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._refuse(getattr(func, "__name__", str(func)), tree_iter((args, kwargs)))
        return func(*args, **(kwargs or {}))
