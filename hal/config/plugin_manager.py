"""Import of a plugin through stevedore."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from stevedore.driver import DriverManager


class _Manager(DriverManager):  # type: ignore[type-arg]  # older releases of stevedore are not generic
    """A stevedore manager for one entry point, found by :mod:`hal.config.plugins`.

    stevedore caches its list of entry points for the life of the process, and on disk under a 32-bit hash of the
    folders' times. It would miss a package that was just installed or added to ``sys.path``.
    """

    def __init__(self, group: str, entry: importlib.metadata.EntryPoint) -> None:
        self._entry = entry
        super().__init__(group, entry.name, on_load_failure_callback=_raise)

    def list_entry_points(self) -> list[importlib.metadata.EntryPoint]:
        """Return the one entry point."""
        return [self._entry]


def import_plugin(group: str, entry: importlib.metadata.EntryPoint) -> Any:
    """Return the object that an entry point names. Exceptions of the import propagate."""
    return _Manager(group, entry).driver


def _raise(manager: Any, entry: importlib.metadata.EntryPoint, error: BaseException) -> None:
    raise error
