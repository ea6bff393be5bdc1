"""A backend's operations, and what stands in for the kernels that it lacks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from hal import ops
from hal.device.closing import Uses
from hal.errors import ClosedError, MissingKernel
from hal.ops.declaration.operation import Operation
from hal.ops.kernels.kernel_table import Kernel, Resolver

log = logging.getLogger("hal.drivers")


class StandIns:
    """Bodies of operations in place of missing kernels: each says so at its first call, or raises under ``strict``.

    Args:
        name: the backend's.
        strict: return whether the config says ``strict``, which may change until a call.
    """

    def __init__(self, name: str, strict: Callable[[], bool]) -> None:
        self._name, self._strict = name, strict
        self._said: set[str] = set()

    def __call__(self, operation: Operation, body: Kernel) -> Kernel:
        """What runs ``body`` for ``operation``."""

        def missing(*args: Any, **kwargs: Any) -> Any:
            if self._strict():
                raise MissingKernel(
                    f"the backend {self._name} has no kernel for {operation.name}, and the config says strict",
                    "choose a driver that has it (`hal ops` lists them), or leave strict out",
                )
            if operation.name not in self._said:
                self._said.add(operation.name)
                log.info("%s has no kernel for %s; its reference runs", self._name, operation.name)
            operation.replace(missing, body)
            return body(*args, **kwargs)

        return missing


def refusing(name: str) -> Resolver:
    """What ``hal.ops`` runs when the active backend, of that name, was closed: an error.

    Not the references, which run before any backend is opened: they would compute much slower than the device that was
    chosen, and nothing would say so.
    """

    def resolve(operation: Operation) -> Kernel:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise ClosedError(
                f"{operation.name} was called, and the backend {name}, which hal.ops went to, is closed",
                "open a backend with hal.open, or call activate() of one that is open",
            )

        return refuse

    return resolve


class BackendOps:
    """The operations on one backend, active or not: ``backend.ops.rms_norm(x, weight, eps)``.

    Args:
        uses: the backend's, each call of an operation among them.
        enter: make a call run on the backend, until ``leave`` is called with what this returned.
        leave: end that.
    """

    def __init__(self, uses: Uses, enter: Callable[[], Any], leave: Callable[[Any], None]) -> None:
        self._uses, self._enter, self._leave = uses, enter, leave
        self._functions: dict[str, Callable[..., Any]] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in self._functions:
            operation = ops.operation(name)
            self._functions[name] = operation.calling(self._kernel(operation))
        return self._functions[name]

    def __dir__(self) -> list[str]:
        """Return the names of all operations, for completion at a prompt."""
        return [*super().__dir__(), *ops.catalogue()]

    def _kernel(self, operation: Operation) -> Kernel:

        def run(*args: Any) -> Any:
            self._uses.check_open()
            token = self._enter()
            try:
                return operation.function(*args)  # which a graph's capture sees
            finally:
                self._leave(token)

        return run
