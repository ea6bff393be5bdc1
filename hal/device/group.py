"""Groups: ranks that communicate, each the process of one device.

Collective operations take the name of a group. The name has the same meaning on every rank of the group, and belongs to
one group per process, so that graphs can hold it.
"""

from __future__ import annotations

import threading
from collections import UserDict
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import attrs

from hal.config.settings import ParallelConfig
from hal.errors import ConfigError, nearest


@attrs.define(eq=False)
class Group:
    """Ranks that communicate.

    Attributes:
        name: the name that collective operations take.
        rank: this process's position in the group, from 0 on.
        size: the number of ranks.
        process_group: the group of ``torch.distributed``; None if this process is the only rank, and after hal closed
            the mesh that it made it for.
        timeout: seconds after which a collective that a rank has not joined fails, for kernels that do not use
            ``process_group``, which has its own.
        planned: whether the ranks are not started: a model can be split between them and traced, and collectives fail.
    """

    name: str
    rank: int = 0
    size: int = 1
    process_group: Any = None
    timeout: float = ParallelConfig().timeout
    planned: bool = False

    def __attrs_post_init__(self) -> None:
        started = self.size > 1 and not self.planned
        if not 0 <= self.rank < self.size or started != (self.process_group is not None):
            raise ConfigError(
                f"the group {self.name!r} has rank {self.rank} of {self.size}"
                + (" and no process group" if self.process_group is None else ""),
                "give a rank from 0 to size - 1, and a process group if and only if there are several ranks",
            )


SOLO = Group("solo")
"""The group of this process alone. Collectives over it change nothing."""

_lock = threading.Lock()
# No dict, which rebound bodies of operations would copy: they must see groups that are made later.
_groups: UserDict[str, Group] = UserDict({SOLO.name: SOLO})
_endings: dict[Group, list[Callable[[], None]]] = {}
"""What to call when a group is forgotten."""


def groups() -> Mapping[str, Group]:
    """Return the groups of this process, by name."""
    return MappingProxyType(_groups)


def group(name: str) -> Group:
    """Return the group ``name`` of this process.

    Raises:
        ConfigError: there is no such group.
    """
    found = _groups.get(name)
    if found is None:
        raise ConfigError(f"this process is in no group {name!r}", nearest(name, _groups))
    return found


def register_group(group: Group) -> None:
    """Make ``group`` known by its name.

    Raises:
        ConfigError: another group has the name.
    """
    with _lock:
        if _groups.setdefault(group.name, group) is not group:
            raise ConfigError(
                f"this process is already in a group {group.name!r}", "give each group of a process another name"
            )


def when_forgotten(group: Group, end: Callable[[], None]) -> None:
    """Have :func:`forget_group` call ``end``, to free what a backend keeps for ``group``."""
    with _lock:
        _endings.setdefault(group, []).append(end)


def forget_group(group: Group) -> None:
    """Remove ``group``, so that its name is free, and free what backends keep for it.

    Graphs that hold the name can no longer run.
    """
    if group is SOLO:
        return
    with _lock:
        if _groups.get(group.name) is group:
            del _groups[group.name]
        endings = _endings.pop(group, [])
    for end in endings:
        end()
