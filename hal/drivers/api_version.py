"""Validation of driver classes, including their driver API version."""

from __future__ import annotations

import inspect
import operator
from types import MappingProxyType
from typing import Any

from hal.drivers.driver import Driver
from hal.errors import DriverIncompatible
from hal.version import API_VERSION

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
