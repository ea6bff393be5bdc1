"""Finding drivers through entry points, and choosing one."""

from __future__ import annotations

import importlib.metadata
import inspect
import operator
from collections.abc import Mapping
from typing import Any

import attrs
from stevedore.driver import DriverManager
from stevedore.exception import NoMatches

from hal.backend import Backend
from hal.config import Source, environment_options, load
from hal.driver import API_VERSION, Driver, Probe
from hal.errors import DriverError, DriverIncompatible, DriverNotFound, DriverUnavailable, HalError, nearest

GROUP = "hal.drivers"


@attrs.frozen
class Candidate:
    """A driver as ``auto`` and ``hal backends`` see it.

    Attributes:
        name: the entry point's name.
        driver: the driver, or None if it could not be loaded.
        probe: what its probe said; if it could not be loaded or raised, that.
    """

    name: str
    driver: Driver | None
    probe: Probe


def driver_names() -> list[str]:
    """The names of all installed drivers; imports none of them."""
    return sorted({entry.name for entry in importlib.metadata.entry_points(group=GROUP)})


def load_driver(name: str) -> Driver:
    """Load the driver ``name``, and no other.

    Raises:
        DriverNotFound: there is none of that name.
        DriverIncompatible: it does not fit this release's driver API.
        DriverError: importing it failed.
    """
    try:
        cls = _entry(name)
    except (ImportError, AttributeError) as error:  # the latter also where the module has no such class
        raise DriverError(
            f"the driver {name} cannot be imported: {error}",
            "reinstall the package that brings it; its authors: see that the entry point names a module and its class",
        ) from error
    return _negotiate(name, cls)


def candidates() -> list[Candidate]:
    """Every installed driver, probed, the highest priority first. A broken one is reported, never raised."""
    found = [_candidate(name) for name in driver_names()]
    return sorted(found, key=lambda each: -each.driver.priority if each.driver else 0)


def open_backend(config: Source = None, *, activate: bool = True) -> Backend:
    """Open the backend that ``config`` asks for.

    Args:
        config: anything that :func:`hal.config.load` reads; None reads the ``HAL_*`` environment variables. The chosen
            driver's own ``HAL_<DRIVER>_*`` variables are its options wherever the config does not set them.
        activate: make ``hal.ops`` go to it. Pass False to open a second one beside the active one.

    Raises:
        ConfigError: the configuration is wrong, or asks for what the backend does not have.
        DriverNotFound: there is no such driver.
        DriverIncompatible: the driver does not fit this release.
        DriverUnavailable: the driver cannot run here, with its reason and hint.
    """
    settings = load(config, driver_names=driver_names() if config is None else ())
    name, driver = _choose() if settings.backend == "auto" else (settings.backend, load_driver(settings.backend))
    options = {**environment_options(name), **settings.options}
    probe = _probe(driver, options)
    if not probe.available:
        raise DriverUnavailable(f"the driver {driver.name} cannot run here: {probe.reason}", probe.hint)
    backend = _open(driver, options)
    backend.configure(settings)
    if activate:
        backend.activate()
    return backend


def _choose() -> tuple[str, Driver]:
    tried = candidates()
    for candidate in tried:
        if candidate.driver is not None and candidate.probe.available:
            return candidate.name, candidate.driver
    reasons = "; ".join(f"{each.name}: {each.probe.reason}" for each in tried) or "none is installed"
    hints = "; ".join(f"{each.name}: {each.probe.hint}" for each in tried) or "reinstall torch-hal"
    raise DriverUnavailable(f"no driver can run here ({reasons})", hints)


def _open(driver: Driver, options: Mapping[str, Any]) -> Backend:
    try:
        backend: Any = driver.open(options)
    except (ImportError, OSError) as error:  # a library that is missing; anything else is a bug, and shows as one
        raise DriverUnavailable(
            f"opening the driver {driver.name} failed: {error}", "install what it needs, or choose another backend"
        ) from error
    if not isinstance(backend, Backend):
        raise DriverIncompatible(
            f"opening the driver {driver.name} gave {backend!r}, not a hal.Backend", "report it to the driver's vendor"
        )
    return backend


def _probe(driver: Driver, options: Mapping[str, Any]) -> Probe:
    try:
        probe: Any = driver.probe_for(options)
    except HalError:
        raise  # an option is wrong
    except Exception as error:
        raise DriverError(
            f"the probe of the driver {driver.name} raised {error!r}", "report it to the driver's vendor"
        ) from error
    if not isinstance(probe, Probe):
        raise DriverIncompatible(
            f"the probe of the driver {driver.name} returned {probe!r}, not a hal.Probe",
            "report it to the driver's vendor",
        )
    return probe


def _candidate(name: str) -> Candidate:
    # The one place that catches everything: a vendor's broken package must not take the others down.
    try:
        driver = load_driver(name)
        return Candidate(name, driver, _probe(driver, environment_options(name)))
    except HalError as error:
        return Candidate(name, None, Probe(False, error.problem, error.remedy))
    except (Exception, SystemExit) as error:
        return Candidate(name, None, Probe(False, f"it raised {error!r}", "report it to the driver's vendor"))


def _entry(name: str) -> Any:
    try:
        return DriverManager(GROUP, name, on_load_failure_callback=_raise).driver
    except NoMatches:
        # stevedore's cache on disk can be two minutes behind an installation; the metadata itself is not.
        for entry in importlib.metadata.entry_points(group=GROUP, name=name):
            return entry.load()
    raise DriverNotFound(f"no driver {name!r} is installed", nearest(name, driver_names()))


def _raise(manager: Any, entry: Any, error: BaseException) -> None:
    raise error


def _negotiate(name: str, cls: Any) -> Driver:
    if not (inspect.isclass(cls) and issubclass(cls, Driver)):
        raise DriverIncompatible(
            f"the entry point {name} in {GROUP} is {cls!r}, not a subclass of hal.Driver",
            "point it at the driver's class",
        )
    missing = sorted(cls.__abstractmethods__) + [each for each in ("name", "api_version") if not hasattr(cls, each)]
    if missing:
        raise DriverIncompatible(
            f"the driver {name} lacks {', '.join(missing)}",
            f"implement them; the driver API is {_version(API_VERSION)}",
        )
    if cls.name != name:  # configurations and variables go by the one, reports by the other
        raise DriverIncompatible(
            f"the entry point {name} in {GROUP} is a driver whose name is {cls.name!r}",
            f"give both the same name: name = {name!r} in the class {cls.__name__}, or rename the entry point",
        )
    if not isinstance(cls.priority, int):
        raise DriverIncompatible(
            f"the driver {name} has the priority {cls.priority!r}, which is no integer",
            "report it to the driver's vendor",
        )
    for each in ("requires", "variables"):  # a text would be taken for its letters
        if isinstance(getattr(cls, each), str):
            raise DriverIncompatible(
                f"the driver {name} has {each} = {getattr(cls, each)!r}, which is no tuple",
                f"make it a tuple of texts: ({getattr(cls, each)!r},)",
            )
    try:
        major, minor = map(operator.index, cls.api_version)
    except (TypeError, ValueError):
        raise DriverIncompatible(
            f"the driver {name} has the API version {cls.api_version!r}", "make it two integers, such as (1, 0)"
        ) from None
    if major != API_VERSION[0]:
        raise DriverIncompatible(
            f"the driver {name} was written for driver API {major}.x; this torch-hal has {_version(API_VERSION)}",
            f"install a release of the driver for API {API_VERSION[0]}.x, or a torch-hal with API {major}.x",
        )
    if minor > API_VERSION[1]:
        unknown = sorted(name for name in vars(cls) if not hasattr(Driver, name) and name not in Driver.__annotations__)
        own = f"; of what it defines, nothing here would call {', '.join(unknown)}" if unknown else ""
        absent = ", ".join(f"{major}.{each}" for each in range(API_VERSION[1] + 1, minor + 1))
        raise DriverIncompatible(
            f"the driver {name} needs driver API {major}.{minor}; this torch-hal has {_version(API_VERSION)} "
            f"and lacks what {absent} added{own}",
            "upgrade torch-hal, or install an older release of the driver",
        )
    return cls()


def _version(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
