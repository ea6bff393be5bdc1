"""The operations of a backend: its kernels, those that packages add, and the fallback for operations without one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

from hal import ops
from hal.config.plugins import Plugin, Plugins
from hal.device.closing import Uses
from hal.errors import ClosedError, ConfigError, MissingKernel
from hal.ops.declaration.operation import Operation
from hal.ops.kernels.kernel_table import Kernel, Resolver
from hal.ops.kernels.partial_kernel import AddedKernel

log = logging.getLogger("hal.drivers")


class ReferenceFallbacks:
    """Reference fallbacks for operations without a kernel.

    Each logs once, at its first call, or raises MissingKernel under ``strict``.

    Args:
        name: the backend's name.
        strict: return the configuration's ``strict``; evaluated at each call.
    """

    def __init__(self, name: str, strict: Callable[[], bool]) -> None:
        self._name, self._strict = name, strict
        self._logged: set[str] = set()

    def __call__(self, operation: Operation, body: Kernel, supports: Collection[str] | None = None) -> Kernel:
        """Return a function that runs ``body`` for ``operation``.

        Args:
            operation: the operation.
            body: its reference implementation.
            supports: the options that its kernel supports; None if it has no kernel.
        """
        call = operation.name
        if supports is not None:
            call += f" with other options than {', '.join(sorted(supports)) or 'the defaults'}"

        def missing(*args: Any, **kwargs: Any) -> Any:
            if self._strict():
                raise MissingKernel(
                    f"the backend {self._name} has no kernel for {call}, and the configuration is strict",
                    "choose a driver that has the kernel (`hal ops` lists them), or set strict to false",
                )
            if call not in self._logged:
                self._logged.add(call)
                log.info("%s has no kernel for %s; its reference implementation runs", self._name, call)
            operation.replace(missing, body)
            return body(*args, **kwargs)

        return missing


def closed_resolver(name: str) -> Resolver:
    """Return a resolver whose kernels raise ClosedError, for ``hal.ops`` after the active backend ``name`` was closed.

    Falling back to the reference implementations would silently be much slower than the device.
    """

    def resolve(operation: Operation) -> Kernel:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise ClosedError(
                f"{operation.name} was called while hal.ops dispatches to the backend {name}, which is closed",
                "open a backend with hal.open, or call activate() on an open one",
            )

        return refuse

    return resolve


class BackendOps:
    """The operations on one backend, active or not: ``backend.ops.rms_norm(x, weight, eps)``.

    Args:
        uses: the backend's use counter; each operation call counts.
        enter: make calls run on the backend, and return a token.
        leave: end that, given the token.
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
                return operation.function(*args)  # the function that graph captures intercept
            finally:
                self._leave(token)

        return run


GROUP = "hal.kernels"


def _added(plugin: Plugin, found: Any) -> AddedKernel:
    if not isinstance(found, AddedKernel):
        raise ConfigError(
            f"the entry point {plugin.name} in {GROUP} is {found!r:.70}", "point it at a hal.vendor.AddedKernel"
        )
    return found


KERNELS: Plugins[AddedKernel] = Plugins(GROUP, "kernel", _added)


def with_added(backend: str, kernels: Mapping[str, Kernel]) -> dict[str, Kernel]:
    """Return a driver's kernels, by operation, and those that packages add. Logs a warning for each that is broken."""
    found = dict(kernels)
    for each in KERNELS.load_all().plugins.values():
        if each.backend == backend:
            found[each.operation] = each.before(found.get(each.operation))
    return found
