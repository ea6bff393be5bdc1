"""A backend's operations, and what stands in for the kernels that it lacks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hal import ops
from hal.errors import MissingKernel
from hal.ops.declaration import Kernel, Operation

if TYPE_CHECKING:
    from hal.backend import Backend

log = logging.getLogger("hal.backend")


class StandIns:
    """Bodies of operations in place of missing kernels: each says so at its first call, or raises under ``strict``."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._said: set[str] = set()

    def __call__(self, operation: Operation, body: Kernel) -> Kernel:
        """What runs ``body`` for ``operation``."""
        backend = self._backend

        def missing(*args: Any, **kwargs: Any) -> Any:
            if backend.config.strict:
                raise MissingKernel(
                    f"the backend {backend.name} has no kernel for {operation.name}, and the config says strict",
                    "choose a driver that has it (`hal ops` lists them), or leave strict out",
                )
            if operation.name not in self._said:
                self._said.add(operation.name)
                log.info("%s has no kernel for %s; its reference runs", backend.name, operation.name)
            operation.replace(missing, body)
            return body(*args, **kwargs)

        return missing


class BackendOps:
    """The operations on one backend, active or not: ``backend.ops.rms_norm(x, weight, eps)``."""

    def __init__(self, backend: Backend, stand_in: StandIns) -> None:
        self._backend, self._stand_in = backend, stand_in
        self._functions: dict[str, Callable[..., Any]] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in self._functions:
            operation = ops.operation(name)
            self._functions[name] = operation.calling(self._kernel(operation))
        return self._functions[name]

    def _kernel(self, operation: Operation) -> Kernel:
        backend = self._backend
        own = backend.kernels.get(operation.name)
        if own is None:
            own = self._stand_in(operation, operation.rebound(lambda inner: getattr(self, inner.name)))

        def run(*args: Any) -> Any:
            # While the backend is active, by the function that a graph's capture sees.
            return (operation.function if backend.active else own)(*args)

        return run
