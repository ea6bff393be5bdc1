"""The emulated CANN, as the NPU driver uses it. It is a distribution of its own, and may not be installed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import attrs

from hal.config import CACHE_DIR, cache_folder, environment_options, read
from hal.errors import ConfigError, DriverError, DriverUnavailable

PACKAGE = "emulated_cann"
OPTIONS = "HAL_NPU_EMULATOR_OPTIONS"
INSTALL = "install it from a checkout of hal: pip install ./emulated-cann"

Switch = Literal["off", "on", "force"]
"""The driver's option ``emulator``; ``force`` emulates even if a real CANN is installed."""


def is_installed() -> bool:
    """Return whether the emulated CANN is installed."""
    return find_spec(PACKAGE) is not None


def emulated_cann() -> ModuleType:
    """Return the package.

    Raises:
        DriverUnavailable: it is not installed.
    """
    if not is_installed():
        raise DriverUnavailable("an emulated NPU requires the package emulated-cann, which is not installed", INSTALL)
    import emulated_cann

    return emulated_cann


def is_active() -> bool:
    """Return whether torch_npu uses the emulated CANN in this process, or would if it were imported."""
    return is_installed() and bool(emulated_cann().is_active())


def is_emulated(folder: Path) -> bool:
    """Return whether a folder has the libraries of the emulated CANN."""
    return is_installed() and bool(emulated_cann().is_emulated(folder))


def activate(*, force: bool, **options: Any) -> None:
    """Make torch_npu use the emulated CANN, whose libraries are kept in ``HAL_CACHE_DIR`` if that is set.

    Args:
        force: use it even if a real CANN is installed.
        options: fields of :class:`emulated_cann.Options`.

    Raises:
        ConfigError: an option is unknown, or has an invalid value.
        DriverUnavailable: the emulated CANN, or something that it requires, is not installed.
        DriverError: torch_npu's import has already been attempted, the emulated CANN is active with other options, or
            it does not compile.
    """
    package = emulated_cann()
    with as_errors_of_hal():
        keep_in_cache()
        package.activate(force=force, **options)


def activate_from_environment() -> None:
    """Activate if ``HAL_NPU_EMULATOR`` is set, with the options in ``HAL_NPU_EMULATOR_OPTIONS``.

    Raises:
        ConfigError: the variable has another value than the driver's option ``emulator``, or an option is invalid.
        DriverUnavailable: as :func:`activate` does.
        DriverError: likewise.
    """
    given = environment_options("npu")
    switch, options = switch_of(given.get("emulator", "off")), given.get("emulator_options", {})
    asked = read(_Asked, {"emulator": switch, "emulator_options": options}, "environment")
    if asked.emulator != "off" and not is_active():
        activate(force=asked.emulator == "force", **asked.emulator_options)


@attrs.frozen
class _Asked:
    emulator: Switch
    emulator_options: dict[str, Any]


def switch_of(value: Any) -> Any:
    """Convert true, false, 1, 0 and the empty string to a :data:`Switch`; return other values unchanged."""
    if isinstance(value, int) and value in (0, 1):
        value = bool(value)
    return {True: "on", False: "off", "": "off"}.get(value, value) if isinstance(value, (bool, str)) else value


def check_compiler(which: Any) -> None:
    """Raise :class:`DriverUnavailable` if the emulated CANN or the compiler that it requires is missing."""
    package = emulated_cann()
    with as_errors_of_hal():
        package.compiler(which)


@contextmanager
def as_errors_of_hal() -> Iterator[None]:
    """Raise the errors of the emulated CANN as those of hal."""
    from emulated_cann import EmulationError, InvalidOption, Unavailable

    try:
        yield
    except InvalidOption as error:
        raise ConfigError(error.problem, error.remedy) from error
    except Unavailable as error:
        raise DriverUnavailable(error.problem, error.remedy) from error
    except EmulationError as error:
        raise DriverError(error.problem, error.remedy) from error


def keep_in_cache() -> None:
    """Have the emulated CANN keep its libraries in ``HAL_CACHE_DIR`` if that is set."""
    from emulated_cann.library_cache import CACHE_DIR as ITS_CACHE_DIR

    if CACHE_DIR in os.environ:
        os.environ.setdefault(ITS_CACHE_DIR, str(cache_folder("emulator")))
