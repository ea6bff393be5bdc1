"""Discovery of drivers through entry points, and selection of one."""

from __future__ import annotations

import inspect
import logging
import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import attrs

from hal.config import Source, environment_mapping, environment_options, environment_variables, load, to_mapping
from hal.config.plugins import Plugin, Plugins
from hal.drivers.backend import Backend
from hal.drivers.driver import Driver, Probe
from hal.drivers.opening import configure_backend, open_driver, probe_driver
from hal.errors import ConfigError, DriverError, DriverIncompatible, DriverNotFound, DriverUnavailable, HalError
from hal.parallel.mesh import Mesh
from hal.version import API_VERSION

GROUP = "hal.drivers"
log = logging.getLogger("hal.drivers")


@attrs.frozen
class Candidate:
    """An installed driver, probed, for ``auto`` and ``hal backends``.

    Attributes:
        name: the entry point's name.
        driver: the driver, or None if loading or probing it raised.
        probe: the probe's result, or one that describes the error.
        error: the error that loading or probing raised, if any.
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
    """Return the names of all installed drivers, without importing them."""
    return DRIVERS.names()


def load_driver(name: str) -> Driver:
    """Load the driver ``name``, and no other.

    Raises:
        DriverNotFound: no driver of that name is installed.
        DriverIncompatible: the driver does not match this release's driver API.
        DriverError: importing or instantiating the driver failed, or several packages provide the name.
    """
    return DRIVERS.load(name)


def candidates() -> list[Candidate]:
    """Return every installed driver, probed, in descending priority. Broken drivers are included, not raised."""
    found = [_candidate(name) for name in driver_names()]
    return sorted(found, key=lambda each: -each.driver.priority if each.driver else 0)


def read_config(source: Source = None) -> dict[str, Any]:
    """Return the keys that a source of :func:`hal.open` sets, without defaults, so that an engine can add its own.

    Args:
        source: any source of :func:`hal.open`; None reads the ``HAL_*`` environment variables.

    Returns:
        A mapping for :func:`hal.open`: a copy, whose tables are dicts.

    Raises:
        ConfigError: as :func:`hal.config.load`.
    """
    names = driver_names() if source is None else ()
    load(source, driver_names=names)  # An error then names the source, and not the engine's keys.
    return _copied(environment_mapping(driver_names=names) if source is None else to_mapping(source))


def merged_config(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the environment's configuration, overridden by keys that are given, in tables one by one.

    Raises:
        ConfigError: as :func:`read_config`.
    """
    settings = read_config()
    for key, value in read_config(given).items():
        both = isinstance(value, dict) and isinstance(settings.get(key), dict)
        settings[key] = {**settings[key], **value} if both else value
    return settings


def _copied(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copied(each) if isinstance(each, Mapping) else each for key, each in table.items()}


def open_backend(config: Source = None, *, activate: bool = True, mesh: Mesh | None = None) -> Backend:
    """Open the backend that ``config`` selects. As a context manager, it is closed at the end of the block.

    Args:
        config: any source that :func:`hal.config.load` reads; None reads the ``HAL_*`` environment variables. The
            driver's ``HAL_<DRIVER>_*`` variables set the options that the config does not.
        activate: make ``hal.ops`` dispatch to the backend. Pass False to open a second one beside the active one.
        mesh: the ranks that this process works with, of an engine that made its process groups itself; see
            :meth:`hal.parallel.Mesh.of`. None joins the ranks that the config asks for.

    Raises:
        ConfigError: the configuration is invalid, or asks for a feature that the backend lacks. With ``auto``, invalid
            ``HAL_<DRIVER>_*`` variables of any driver raise too.
        DriverNotFound: no driver of that name is installed.
        DriverIncompatible: the driver does not match this release.
        DriverUnavailable: the driver cannot run on this machine.
        DriverError: importing, probing or opening the driver raised. ``auto`` logs a warning for a driver that it
            cannot import or probe, and skips it.
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
        if mesh is not None:
            backend.mesh = mesh
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
            log.warning("auto skips the driver %s: %s", candidate.name, candidate.probe.reason)
    for candidate in tried:
        if candidate.driver is not None and candidate.probe.available:
            return candidate.name, candidate.driver
    reasons = "; ".join(f"{each.name}: {each.probe.reason}" for each in tried) or "none is installed"
    hints = "; ".join(f"{each.name}: {each.probe.hint}" for each in tried) or "reinstall torch-hal"
    raise DriverUnavailable(f"no driver can run here ({reasons})", hints)


@contextmanager
def _naming_variables(name: str, given: Mapping[str, Any]) -> Iterator[None]:
    """Add to a ConfigError the environment variables that set options, except the ``given`` options."""
    try:
        yield
    except ConfigError as error:
        variables = [variable for option, variable in environment_variables(name).items() if option not in given]
        if not variables:
            raise
        raise error.reworded(f"{error.problem} (options set by {', '.join(variables)})", error.remedy) from None


def _candidate(name: str) -> Candidate:
    # Catches every HalError: a vendor's broken package must not disable the other drivers.
    try:
        driver, options = load_driver(name), environment_options(name)
        with _naming_variables(name, {}):
            return Candidate(name, driver, probe_driver(driver, options))
    except HalError as error:
        return Candidate(name, None, Probe(False, error.problem, error.remedy), error)


CHANGED = MappingProxyType({4: ": `linear`, `grouped_linear` and `embedding` take weights in any form"})
"""Summary of the changes in each major version of the driver API; ``docs/how-to/moving-to-N.md`` has the details."""


def check_driver(name: str, group: str, cls: Any) -> None:
    """Raise DriverIncompatible unless ``cls``, loaded from the entry point ``name``, is a usable driver."""
    if not (inspect.isclass(cls) and issubclass(cls, Driver)):
        raise DriverIncompatible(
            f"the entry point {name} in {group} is {cls!r}, not a subclass of hal.vendor.Driver",
            "point the entry point at the driver's class",
        )
    missing = sorted(cls.__abstractmethods__) + [each for each in ("name", "api_version") if not hasattr(cls, each)]
    if missing:
        raise DriverIncompatible(
            f"the driver {name} lacks {', '.join(missing)}",
            f"implement them; this torch-hal has driver API {_version(API_VERSION)}",
        )
    if cls.name != name:  # configurations and variables use the entry point's name, reports the class's
        raise DriverIncompatible(
            f"the entry point {name} in {group} loads a driver whose name is {cls.name!r}; the two must be equal",
            f"set name = {name!r} in the class {cls.__name__}, or rename the entry point",
        )
    if not isinstance(cls.priority, int):
        raise DriverIncompatible(
            f"the driver {name} has priority = {cls.priority!r}, which is not an integer",
            "report it to the driver's vendor",
        )
    for each in ("requires", "variables"):  # a string would be iterated by character
        if isinstance(getattr(cls, each), str):
            raise DriverIncompatible(
                f"the driver {name} has {each} = {getattr(cls, each)!r}, which is not a tuple",
                f"make it a tuple of strings: ({getattr(cls, each)!r},)",
            )
    try:
        major, minor = map(operator.index, cls.api_version)
    except (TypeError, ValueError):
        raise DriverIncompatible(
            f"the driver {name} has api_version = {cls.api_version!r}, which is not two integers",
            "set api_version to two integers, such as (4, 0)",
        ) from None
    if major != API_VERSION[0]:
        changed = CHANGED.get(major + 1, "")
        page = f"; docs/how-to/moving-to-{major + 1}.md describes the migration" if changed else ""
        raise DriverIncompatible(
            f"the driver {name} was written for driver API {major}.x; this torch-hal has "
            f"{_version(API_VERSION)}{changed}",
            f"install a release of the driver for API {API_VERSION[0]}.x, or a torch-hal with API {major}.x{page}",
        )
    if minor > API_VERSION[1]:
        unknown = sorted(name for name in vars(cls) if not hasattr(Driver, name) and name not in Driver.__annotations__)
        own = f"; torch-hal would never call its {', '.join(unknown)}" if unknown else ""
        absent = ", ".join(f"{major}.{each}" for each in range(API_VERSION[1] + 1, minor + 1))
        raise DriverIncompatible(
            f"the driver {name} needs driver API {major}.{minor}; this torch-hal has {_version(API_VERSION)} "
            f"and lacks the additions of {absent}{own}",
            "upgrade torch-hal, or install an older release of the driver",
        )


def _version(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
