"""Importing a plugin through stevedore."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from stevedore.driver import DriverManager


class _Manager(DriverManager):  # type: ignore[type-arg]  # older releases of stevedore are not generic
    """Loads one entry point that hal has found.

    stevedore's own list of entry points is kept for the life of the process and, on disk, under a hash of the folders'
    times in 32 bits, which are two minutes apart. It would miss what has just been installed or put on ``sys.path``.
    """

    def __init__(self, group: str, entry: importlib.metadata.EntryPoint) -> None:
        self._entry = entry
        super().__init__(group, entry.name, on_load_failure_callback=_raise)

    def list_entry_points(self) -> list[importlib.metadata.EntryPoint]:
        """Return the one entry point."""
        return [self._entry]


def import_plugin(group: str, entry: importlib.metadata.EntryPoint) -> Any:
    """Return what an entry point of a group names. Raises whatever importing it raises."""
    return _Manager(group, entry).driver


def _raise(manager: Any, entry: importlib.metadata.EntryPoint, error: BaseException) -> None:
    raise error
