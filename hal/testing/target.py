"""What the suite examines: a backend, opened as a vendor's hook says, as often as a case needs it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch

from hal.config import Config, read
from hal.device.device import Device
from hal.drivers import registry
from hal.drivers.backend import Backend
from hal.drivers.driver import Driver
from hal.ops.declaration.operation import Operation
from hal.step.state import KEY_VALUE
from hal.testing.case import NotApplicable

Opener = Callable[[], Backend]


class Target:
    """A driver under examination.

    Args:
        name: of the driver.
        config: what every opening has in its configuration.
        opener: opens it in place of the driver's entry point; the suite configures what it gives.
    """

    def __init__(self, name: str, config: Mapping[str, Any], opener: Opener | None) -> None:
        self.name = name
        self._config = dict(config)
        self._opener = opener
        self.kept: dict[Any, Any] = {}

    @cached_property
    def backend(self) -> Backend:
        """Opened with nothing but the hook's configuration; not made active."""
        return self._opened({}, activate=False)

    @property
    def driver(self) -> Driver | None:
        """The driver, unless the hook opens the backend by itself."""
        return None if self._opener else registry.load_driver(self.name)

    @property
    def device(self) -> Device:
        """Of the backend."""
        return self.backend.device

    def activated(self) -> Backend:
        """The backend, active."""
        self.backend.activate()
        return self.backend

    def require_canonical(self, operation: Operation) -> None:
        """Raise NotApplicable if the backend lays out a state of the operation's as no sample has it."""
        layout = self.backend.state_layout
        if layout != "canonical" and KEY_VALUE.intersection(operation.state):
            raise NotApplicable(f"the cache's layout is {layout}, which samples do not have; runners and models do")

    def open(self, **config: Any) -> Backend:
        """A new backend with these keys of the configuration beside the hook's, active."""
        return self._opened(config, activate=True)

    def keep(self, key: Any, make: Callable[[], Any]) -> Any:
        """What ``make`` gives, made once for ``key``; until :meth:`forget`."""
        if key not in self.kept:
            self.kept[key] = make()
        return self.kept[key]

    def forget(self) -> None:
        """Drop all that is kept, and what the device's allocator holds of it."""
        self.kept.clear()
        gc.collect()
        self.device.empty_cache()

    def release(self) -> None:
        """Drop what is kept, if anything was ever opened."""
        if self.kept:
            self.forget()

    def _opened(self, given: Mapping[str, Any], *, activate: bool) -> Backend:
        merged = {**self._config}
        for key, value in given.items():
            known = merged.get(key)
            merged[key] = {**known, **value} if isinstance(known, Mapping) and isinstance(value, Mapping) else value
        config = read(Config, {"backend": self.name, **merged}, "configuration")
        if self._opener is None:
            return registry.open_backend(config, activate=activate)
        backend = self._opener()
        backend.configure(config)
        if activate:
            backend.activate()
        return backend


def dtype_name(dtype: torch.dtype) -> str:
    """Such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def reference_backend(dtype: torch.dtype, num_tokens: int, block_size: int, max_prefill_tokens: int = 2048) -> Backend:
    """A backend without a kernel: every operation runs its declaration, on the CPU. Not made active."""
    from hal.device.host_device import HostDevice

    backend = Backend("reference", HostDevice(), kernels={})
    config = {
        "backend": "reference", "dtype": dtype_name(dtype), "max_prefill_tokens": max_prefill_tokens,
        "cache": {"num_tokens": num_tokens, "block_size": block_size},
    }  # fmt: skip
    backend.configure(read(Config, config))
    return backend
