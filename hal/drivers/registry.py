"""Finding drivers through entry points, and choosing one."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs

from hal.config import Source, environment_options, environment_variables, load
from hal.config.plugins import Plugin, Plugins
from hal.drivers.api_version import check_driver
from hal.drivers.backend import Backend
from hal.drivers.driver import Driver, Probe
from hal.drivers.opening import configure_backend, open_driver, probe_driver
from hal.errors import ConfigError, DriverError, DriverNotFound, DriverUnavailable, HalError

GROUP = "hal.drivers"
log = logging.getLogger("hal.drivers")


@attrs.frozen
class Candidate:
    """A driver as ``auto`` and ``hal backends`` see it.

    Attributes:
        name: the entry point's name.
        driver: the driver, or None if it is broken: it could not be loaded, or its probe raised.
        probe: what its probe said; of a broken one, what is wrong with it.
        error: of a broken one, what was raised.
    """

    name: str
    driver: Driver | None
    probe: Probe
    error: HalError | None = None


def _check(plugin: Plugin, found: Any) -> Driver:
    check_driver(plugin.name, GROUP, found)
    driver: Driver = found()
    return driver


DRIVERS: Plugins[Driver] = Plugins(GROUP, "driver", _check, error=DriverError, unknown=DriverNotFound)


def driver_names() -> list[str]:
    """The names of all installed drivers; imports none of them."""
    return DRIVERS.names()


def load_driver(name: str) -> Driver:
    """Load the driver ``name``, and no other.

    Raises:
        DriverNotFound: there is none of that name.
        DriverIncompatible: it does not fit this release's driver API.
        DriverError: importing it or making an instance of it failed, or several packages bring one of that name.
    """
    return DRIVERS.load(name)


def candidates() -> list[Candidate]:
    """Every installed driver, probed, the highest priority first. A broken one is reported, never raised."""
    found = [_candidate(name) for name in driver_names()]
    return sorted(found, key=lambda each: -each.driver.priority if each.driver else 0)


def open_backend(config: Source = None, *, activate: bool = True) -> Backend:
    """Open the backend that ``config`` asks for. As a context manager it is closed at the end of the block.

    Args:
        config: anything that :func:`hal.config.load` reads; None reads the ``HAL_*`` environment variables. The chosen
            driver's own ``HAL_<DRIVER>_*`` variables are its options wherever the config does not set them.
        activate: make ``hal.ops`` go to it. Pass False to open a second one beside the active one.

    Raises:
        ConfigError: the configuration is wrong, or asks for what the backend does not have. With ``auto``, also what is
            wrong with the variables of any driver, for whoever set them meant that driver.
        DriverNotFound: there is no such driver.
        DriverIncompatible: the driver does not fit this release.
        DriverUnavailable: the driver cannot run here, with its reason and hint.
        DriverError: the driver is broken: it cannot be imported, or raised when it was probed or opened. ``auto`` warns
            of one that cannot be imported or probed, and goes on to the next.
    """
    settings = load(config, driver_names=driver_names() if config is None else ())
    name, driver = _choose() if settings.backend == "auto" else (settings.backend, load_driver(settings.backend))
    options = {**environment_options(name), **settings.options}
    with _naming_variables(name, settings.options):
        probe = probe_driver(driver, options)
        if not probe.available:
            raise DriverUnavailable(f"the driver {driver.name} cannot run here: {probe.reason}", probe.hint)
        backend = open_driver(driver, options)
    try:
        configure_backend(backend, settings)
        if activate:
            backend.activate()
    except BaseException:
        backend.close()
        raise
    return backend


def _choose() -> tuple[str, Driver]:
    tried = candidates()
    for candidate in tried:
        if isinstance(candidate.error, ConfigError) and environment_variables(candidate.name):
            raise candidate.error
    for candidate in tried:
        if candidate.driver is None:
            log.warning("auto passes over the driver %s: %s", candidate.name, candidate.probe.reason)
    for candidate in tried:
        if candidate.driver is not None and candidate.probe.available:
            return candidate.name, candidate.driver
    reasons = "; ".join(f"{each.name}: {each.probe.reason}" for each in tried) or "none is installed"
    hints = "; ".join(f"{each.name}: {each.probe.hint}" for each in tried) or "reinstall torch-hal"
    raise DriverUnavailable(f"no driver can run here ({reasons})", hints)


@contextmanager
def _naming_variables(name: str, given: Mapping[str, Any]) -> Iterator[None]:
    """Add to a ConfigError which variables set a driver's options, beside those that are ``given``."""
    try:
        yield
    except ConfigError as error:
        variables = [variable for option, variable in environment_variables(name).items() if option not in given]
        if not variables:
            raise
        raise ConfigError(f"{error.problem} (options set by {', '.join(variables)})", error.remedy) from None


def _candidate(name: str) -> Candidate:
    # Whatever is wrong: a vendor's broken package must not take the others down.
    try:
        driver, options = load_driver(name), environment_options(name)
        with _naming_variables(name, {}):
            return Candidate(name, driver, probe_driver(driver, options))
    except HalError as error:
        return Candidate(name, None, Probe(False, error.problem, error.remedy), error)
