"""Import torch with the environment that hal needs, whichever module imports it first.

``import hal`` does not import torch, so that help texts and drivers' probes need not wait for it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
SPIN = "GOMP_SPINCOUNT"
DEFAULTS = {
    # `import torch` imports every installed vendor package, and fails if one of them does. Drivers import their own
    # when they are opened.
    AUTOLOAD: "0",
    # Threads of torch's libgomp that wait for others keep their cores for 300,000 turns of a loop, some milliseconds.
    # Where processes share cores, the others then wait for them. 10,000 turns still span what Python runs between two
    # kernels.
    SPIN: "10000",
}
"""Environment variables with which hal imports torch, where the user sets none. Later code gets the original ones."""


def prepare() -> None:
    """Set the variables during the first import of torch, unless the user asks torch to import vendors' packages."""
    if "torch" not in sys.modules and os.environ.get(AUTOLOAD, "0") == "0":
        sys.meta_path.insert(0, _Finder())


@contextmanager
def _defaults() -> Iterator[None]:
    added = {name: text for name, text in DEFAULTS.items() if name not in os.environ}
    if "OMP_WAIT_POLICY" in os.environ:
        added.pop(SPIN, None)
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


class _Finder(importlib.abc.MetaPathFinder):
    """Finds torch as the other finders do, with a loader that sets the variables."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch":
            return None
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        found = (each.find_spec(fullname, path, target) for each in others)
        spec = next((each for each in found if each is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec


class _Loader(importlib.abc.Loader):
    """Runs another loader, and leaves no trace of this one."""

    def __init__(self, loader: importlib.abc.Loader, finder: _Finder) -> None:
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        with _defaults():
            self._loader.exec_module(module)
        sys.meta_path.remove(self._finder)
