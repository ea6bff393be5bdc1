"""The backend under test, opened with the configuration of the vendor's hook."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from functools import cached_property
from types import MappingProxyType
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
    """The driver under test.

    Args:
        name: name of the driver.
        config: configuration that every opened backend shares.
        opener: returns a new backend, in place of the driver's entry point; the suite configures it.
        ranks: more configuration, for processes of ranks.
    """

    def __init__(
        self,
        name: str,
        config: Mapping[str, Any],
        opener: Opener | None,
        ranks: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.name = name
        self._config = dict(config)
        self._opener = opener
        self._ranks = dict(ranks)
        self._cache: dict[Any, Any] = {}

    @cached_property
    def backend(self) -> Backend:
        """Return the backend opened with the hook's configuration only; it is not activated."""
        return self._opened({}, activate=False)

    @property
    def driver(self) -> Driver | None:
        """Return the driver, or None if the hook opens the backend itself."""
        return None if self._opener else registry.load_driver(self.name)

    @property
    def device(self) -> Device:
        """Return the backend's device."""
        return self.backend.device

    def activated(self) -> Backend:
        """Activate the backend and return it."""
        self.backend.activate()
        return self.backend

    def require_canonical(self, operation: Operation) -> None:
        """Raise NotApplicable if the operation uses a cache whose layout on this backend differs from the samples'."""
        layout = self.backend.state_layout
        if layout != "canonical" and KEY_VALUE.intersection(operation.state):
            raise NotApplicable(f"the samples use the canonical cache layout, and the backend uses {layout}")

    def open(self, **config: Any) -> Backend:
        """Open and activate a new backend with these configuration keys added to the hook's."""
        return self._opened(config, activate=True)

    def cached(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the object cached under ``key``; call ``make`` to create it if it is absent."""
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    def drop(self, key: Any) -> None:
        """Remove one object from the cache, if present."""
        self._cache.pop(key, None)

    def clear_cache(self) -> None:
        """Drop all cached objects and free the device memory that its allocator reserves."""
        self._cache.clear()
        gc.collect()
        self.device.empty_cache()

    def release(self) -> None:
        """Clear the cache, unless it is empty; an unavailable driver is not opened."""
        if self._cache:
            self.clear_cache()

    def rank_config(self) -> dict[str, Any]:
        """Return the configuration with which each rank opens the driver."""
        return {"backend": self.name, **self._merged(self._ranks)}

    def _merged(self, given: Mapping[str, Any]) -> dict[str, Any]:
        merged = {**self._config}
        for key, value in given.items():
            known = merged.get(key)
            merged[key] = {**known, **value} if isinstance(known, Mapping) and isinstance(value, Mapping) else value
        return merged

    def _opened(self, given: Mapping[str, Any], *, activate: bool) -> Backend:
        config = read(Config, {"backend": self.name, **self._merged(given)}, "configuration")
        if self._opener is None:
            return registry.open_backend(config, activate=activate)
        backend = self._opener()
        backend.configure(config)
        if activate:
            backend.activate()
        return backend


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def reference_backend(dtype: torch.dtype, num_tokens: int, block_size: int) -> Backend:
    """Return a CPU backend without kernels, which runs the body of every operation; it is not activated."""
    from hal.device.host_device import HostDevice

    backend = Backend("reference", HostDevice(), kernels={})
    config = {
        "backend": "reference",
        "dtype": dtype_name(dtype),
        "max_prefill_tokens": 2048,
        "cache": {"num_tokens": num_tokens, "block_size": block_size},
    }
    backend.configure(read(Config, config))
    return backend
