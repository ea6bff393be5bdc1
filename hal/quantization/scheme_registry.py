"""The quantisation schemes of all installed packages."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Mapping
from functools import cache

from hal.errors import ConfigError
from hal.quantization.scheme import Scheme

GROUP = "hal.quantization"


def schemes() -> Mapping[str, Scheme]:
    """Return the registered schemes, by name.

    Raises:
        ConfigError: an entry point cannot be imported, or is no scheme of that name.
    """
    return _schemes(tuple(sys.path))


def supported() -> str:
    """Return what hal reads, for the remedy of an error."""
    known = "; ".join(f"{scheme.summary} ({name})" for name, scheme in schemes().items())
    return f"hal reads {known}, as compressed-tensors or ModelSlim write them"


@cache
def _schemes(path: tuple[str, ...]) -> Mapping[str, Scheme]:
    """As found on an import path, since a search takes milliseconds."""
    found: dict[str, Scheme] = {}
    for entry in importlib.metadata.entry_points(group=GROUP):
        try:
            made = entry.load()()
        except Exception as error:  # importing runs code of others, which may raise anything
            raise ConfigError(
                f"the quantisation scheme {entry.name}, {entry.value}, cannot be imported: "
                f"{type(error).__name__}: {error}",
                "correct or uninstall its package",
            ) from error
        if not isinstance(made, Scheme) or made.name != entry.name:
            raise ConfigError(
                f"the entry point {entry.name} in {GROUP} is {made!r:.70}",
                "point it at a subclass of hal.quantization.scheme.Scheme of the same name",
            )
        lacking = [("write", made.writes), ("activation", made.calibrated)]
        if missing := [name for name, needed in lacking if needed and name not in _overridden(made)]:
            raise ConfigError(
                f"the quantisation scheme {entry.name} says that it is written, and has no {missing[0]}()",
                "let its package bring that method, or leave `writes` and `calibrated` out",
            )
        found[entry.name] = made
    return dict(sorted(found.items()))


def _overridden(scheme: Scheme) -> set[str]:
    return {name for name in ("write", "activation") if getattr(type(scheme), name) is not getattr(Scheme, name)}
