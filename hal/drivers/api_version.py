"""Whether a class is a driver, and one that this release can use."""

from __future__ import annotations

import inspect
import operator
from types import MappingProxyType
from typing import Any

from hal.drivers.driver import Driver
from hal.errors import DriverIncompatible
from hal.version import API_VERSION

CHANGED = MappingProxyType({
    2: (
        ": a backend takes graphs=True and compilers as objects, `allocate` and `state_layout` replace `kv_cache` and "
        "`cache_layout`, and `decoder` is gone"
    ),
})  # fmt: skip
"""By major version of the driver API, what it changed, in short; the page ``docs/how-to/moving-to-N.md`` tells more."""


def check_driver(name: str, group: str, cls: Any) -> None:
    """Raise DriverIncompatible unless ``cls``, which the entry point ``name`` in ``group`` gave, can be used."""
    if not (inspect.isclass(cls) and issubclass(cls, Driver)):
        raise DriverIncompatible(
            f"the entry point {name} in {group} is {cls!r}, not a subclass of hal.Driver",
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
            f"the entry point {name} in {group} is a driver whose name is {cls.name!r}",
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
            f"the driver {name} has the API version {cls.api_version!r}", "make it two integers, such as (2, 0)"
        ) from None
    if major != API_VERSION[0]:
        changed = CHANGED.get(major + 1, "")
        page = f"; docs/how-to/moving-to-{major + 1}.md says how to bring a driver over" if changed else ""
        raise DriverIncompatible(
            f"the driver {name} was written for driver API {major}.x; this torch-hal has "
            f"{_version(API_VERSION)}{changed}",
            f"install a release of the driver for API {API_VERSION[0]}.x, or a torch-hal with API {major}.x{page}",
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


def _version(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
