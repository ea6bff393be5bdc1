"""Probing and opening a driver: whatever it raises or gives becomes an error that names it."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hal.config import Config
from hal.drivers.backend import Backend
from hal.drivers.backend_checks import check_opened
from hal.drivers.driver import Driver, Probe
from hal.errors import ConfigError, DriverError, DriverIncompatible, DriverUnavailable, HalError, said

REPORT = "report it to the driver's vendor"


def probe_driver(driver: Driver, options: Mapping[str, Any]) -> Probe:
    """Ask a driver whether it can run here.

    Raises:
        ConfigError: an option is wrong.
        DriverIncompatible: what the probe gives is none.
        DriverError: the probe raised.
    """
    with _naming(driver.name):
        return _probe(driver, options)


def open_driver(driver: Driver, options: Mapping[str, Any]) -> Backend:
    """Open a driver, and check what it gives. Neither configures the backend nor activates it.

    Raises:
        DriverUnavailable: a library that it needs is missing.
        DriverIncompatible: what it gives is no backend, or not one that is whole.
        DriverError: opening it raised something else; errors of hal's own are passed on, with the driver's name.
    """
    with _naming(driver.name):
        return _open(driver, options)


def configure_backend(backend: Backend, settings: Config) -> None:
    """Give a backend its configuration.

    Raises:
        ConfigError: it asks for what the backend does not have.
        DriverError: a method of the driver's own raised.
    """
    try:
        backend.configure(settings)
    except HalError:
        raise
    except Exception as error:  # of a subclass
        raise DriverError(
            f"configuring the backend of the driver {backend.name} raised {said(error)}",
            f"{REPORT}, or choose another backend",
        ) from error


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Add the driver's name to an error that does not say it, such as one of the values that the driver gives.

    What is wrong with the configuration is the user's, and stays as it is.
    """
    try:
        yield
    except ConfigError:
        raise
    except HalError as error:
        if re.search(rf"\b{re.escape(name)}\b", str(error)) or type(error).__init__ is not HalError.__init__:
            raise
        named = type(error)(f"the driver {name}: {error.problem}", error.remedy)
        raise named.with_traceback(error.__traceback__) from error.__cause__  # as if the driver itself had raised it


def _open(driver: Driver, options: Mapping[str, Any]) -> Backend:
    try:
        backend: Any = driver.open(options)
    except HalError:
        raise
    except (ImportError, OSError) as error:  # a library that is missing
        raise DriverUnavailable(
            f"opening the driver {driver.name} failed: {error}", "install what it needs, or choose another backend"
        ) from error
    except (Exception, SystemExit) as error:
        raise DriverError(
            f"opening the driver {driver.name} raised {said(error)}", f"{REPORT}, or choose another backend"
        ) from error
    if not isinstance(backend, Backend):
        raise DriverIncompatible(
            f"opening the driver {driver.name} gave {reprlib.repr(backend)}, not a hal.Backend", REPORT
        )
    check_opened(driver.name, backend)
    if backend.name != driver.name:  # configurations and variables go by the one, errors by the other
        raise DriverIncompatible(
            f"opening the driver {driver.name} gave a backend whose name is {backend.name!r}",
            f"{REPORT}; its authors: give both the same name",
        )
    return backend


def _probe(driver: Driver, options: Mapping[str, Any]) -> Probe:
    try:
        probe: Any = driver.probe_for(options)
    except HalError:
        raise  # an option is wrong
    except (Exception, SystemExit) as error:
        raise DriverError(f"the probe of the driver {driver.name} raised {error!r}", REPORT) from error
    if not isinstance(probe, Probe):
        raise DriverIncompatible(
            f"the probe of the driver {driver.name} returned {reprlib.repr(probe)}, not a hal.Probe", REPORT
        )
    return probe
