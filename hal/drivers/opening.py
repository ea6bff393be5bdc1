"""Probing, opening and configuring a driver; exceptions and wrong results become errors that name the driver."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hal.config import Config
from hal.device.device import out_of_memory_message
from hal.drivers.backend import Backend
from hal.drivers.backend_checks import check_opened
from hal.drivers.driver import Driver, Probe
from hal.errors import (
    ConfigError,
    DeviceOutOfMemory,
    DriverError,
    DriverIncompatible,
    DriverUnavailable,
    HalError,
    describe_exception,
)
from hal.ops.kernels.kernel_table import Table, withdraw

REPORT = "report it to the driver's vendor"


def probe_driver(driver: Driver, options: Mapping[str, Any]) -> Probe:
    """Probe a driver with ``options``.

    Raises:
        ConfigError: an option is invalid.
        DriverIncompatible: the result is not a :class:`hal.vendor.Probe`.
        DriverError: the probe raised.
    """
    try:
        with _name_driver(driver.name):
            probe: Any = driver.probe_for(options)
    except HalError:
        raise  # an option is invalid
    except (Exception, SystemExit) as error:
        raise DriverError(f"the probe of the driver {driver.name} raised {error!r}", REPORT) from error
    if not isinstance(probe, Probe):
        raise DriverIncompatible(
            f"the probe of the driver {driver.name} returned {reprlib.repr(probe)}, not a hal.vendor.Probe", REPORT
        )
    return probe


def open_driver(driver: Driver, options: Mapping[str, Any]) -> Backend:
    """Open a driver, and validate the backend. The backend is neither configured nor activated.

    Raises:
        DriverUnavailable: a library that the driver needs is missing.
        DriverIncompatible: the result is not a complete backend.
        DeviceOutOfMemory: the device has too little free memory.
        DriverError: the driver raised another exception. A HalError is passed on, with the driver's name added.
    """
    try:
        with _name_driver(driver.name):
            backend: Any = driver.open(options)
    except HalError:
        raise
    except (ImportError, OSError) as error:  # a missing library
        raise DriverUnavailable(
            f"opening the driver {driver.name} failed: {error}",
            "install the missing library, or choose another backend",
        ) from error
    except (Exception, SystemExit) as error:
        raise _error_of_driver(f"opening the driver {driver.name}", error) from error
    if not isinstance(backend, Backend):
        raise DriverIncompatible(
            f"opening the driver {driver.name} returned {reprlib.repr(backend)}, not a hal.Backend", REPORT
        )
    try:
        check_opened(driver.name, backend)
    except BaseException:
        _withdraw(backend)
        raise
    if backend.name != driver.name:  # configurations and variables use the driver's name, errors the backend's
        raise DriverIncompatible(
            f"opening the driver {driver.name} returned a backend with the name {backend.name!r}",
            f"{REPORT}, who must pass name={driver.name!r} to hal.Backend",
        )
    return backend


def configure_backend(backend: Backend, settings: Config) -> None:
    """Apply a configuration to a backend.

    Raises:
        ConfigError: the configuration asks for a feature that the backend lacks.
        DeviceOutOfMemory: the device has too little free memory.
        DriverError: the driver's code raised.
    """
    try:
        backend.configure(settings)
    except HalError:
        raise
    except Exception as error:  # raised by an override in the driver
        raise _error_of_driver(f"configuring the backend of the driver {backend.name}", error) from error


def _error_of_driver(what: str, error: BaseException) -> HalError:
    """Return the error for what a driver's code raised."""
    if problem := out_of_memory_message(error):
        return DeviceOutOfMemory(
            f"{what}: {problem}", "end other processes that use the device's memory, or choose another device"
        )
    return DriverError(f"{what} raised {describe_exception(error)}", f"{REPORT}, or choose another backend")


@contextmanager
def _name_driver(name: str) -> Iterator[None]:
    """Add the driver's name to a HalError of its code, except to ConfigError, which the user's settings cause."""
    try:
        yield
    except ConfigError:
        raise
    except HalError as error:
        if type(error).__init__ is not HalError.__init__:
            raise
        named = error.reworded(f"the driver {name}: {error.problem}", error.remedy)
        raise named.with_traceback(error.__traceback__) from error.__cause__  # as if the driver had raised it


def _withdraw(backend: Backend) -> None:
    """Withdraw the kernel table of an incomplete backend, which exists until the next garbage collection.

    A table resolves every operation that is declared later, and this backend may lack what that needs.
    """
    table = vars(backend).get("table")  # absent if the constructor of hal.Backend was not called
    if isinstance(table, Table):
        withdraw(table)
