"""The option ``--emulate``, which runs a driver on an emulated device through its option ``emulator``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs

from hal.errors import ConfigError, DriverNotFound, UnknownKey

if TYPE_CHECKING:
    from hal.drivers.registry import Candidate

EMULATE_EACH = "Run drivers with an emulator on an emulated device; sets their option emulator."
EMULATE = "Run the backend's driver on an emulated device; sets its option emulator."


@contextmanager
def emulated(emulate: bool, backend: str | None) -> Iterator[dict[str, Any]]:
    """Yield the driver options that ``--emulate`` adds. Open the backend inside the block.

    Args:
        emulate: whether the option was given; if not, nothing is added.
        backend: the driver's name; None or ``auto`` for none.

    Raises:
        ConfigError: no driver is named, or it has no such option.
    """
    if not emulate:
        yield {}
        return
    from hal.config import environment_options

    if backend in (None, "auto"):
        raise ConfigError(
            "--emulate needs a driver, and none is named",
            "use --backend NAME or HAL_BACKEND; `hal backends` lists the drivers",
        )
    try:
        # The variable may request more than True does, for example to hide a real device.
        yield {"emulator": environment_options(str(backend)).get("emulator") or True}
    except ConfigError as error:
        if not has_no_emulator(error):
            raise
        raise UnknownKey(
            f"the driver {backend} has no emulated device (--emulate): {error.problem}",
            "omit --emulate, or choose another --backend",
            key=error.key,
        ) from error


def has_no_emulator(error: ConfigError) -> bool:
    """Return whether a driver raised the error for its option ``emulator``, which it does not have."""
    return isinstance(error, UnknownKey) and error.key == "emulator"


def probed(emulate: bool, only: str | None = None) -> list[tuple[Candidate, dict[str, Any]]]:
    """Return the installed drivers with the options to open them, in descending priority.

    Args:
        emulate: probe each for its emulated device; a driver without one may refuse the option only when it is opened.
        only: a driver's name; None for all.

    Raises:
        DriverNotFound: no driver is named ``only``.
    """
    from hal.config import environment_options
    from hal.drivers.opening import probe_driver
    from hal.drivers.registry import candidates, load_driver

    tried = candidates()
    if only is not None and not (tried := [each for each in tried if each.name == only]):
        load_driver(only)  # raises
        raise DriverNotFound(f"no driver {only!r} is installed", "choose another --backend")
    found: list[tuple[Candidate, dict[str, Any]]] = []
    for each in tried:
        options: dict[str, Any] = {} if each.driver is None else dict(environment_options(each.name))
        if emulate and each.driver is not None:
            asked = {**options, "emulator": options.get("emulator") or True}
            try:
                each, options = attrs.evolve(each, probe=probe_driver(each.driver, asked)), asked
            except ConfigError as error:
                if not has_no_emulator(error):
                    raise
        found.append((each, options))
    return found
