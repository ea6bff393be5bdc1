"""Public names that are imported when they are first used: a driver's probe must not wait for torch."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def imported_on_use(module: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module's ``__getattr__``.

    Args:
        module: the module's name.
        homes: for each name, the module that defines it, and behind a colon its name there if that is another.
    """

    def __getattr__(name: str) -> Any:  # noqa: N807 - the module's
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, _, attribute = homes[name].partition(":")
        value = getattr(importlib.import_module(home), attribute or name)
        setattr(sys.modules[module], name, value)
        return value

    return __getattr__
