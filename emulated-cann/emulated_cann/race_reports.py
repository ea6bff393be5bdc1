"""Races: accesses of launches to the same bytes, one of which writes, without an order between them.

They require that the emulated CANN is active. Streams, events, waits of the host, replays and collectives order
launches. A race is found even if the launches ran one after the other in this run.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

import attrs

from .control import native_library
from .tracing import synchronize


@attrs.frozen
class Race:
    """Two launches that access the same bytes without an order between them.

    Attributes:
        first: the kernel, copy or free that ran first.
        second: the one that ran second.
        text: the report, with the Python stack of both calls.
    """

    first: str
    second: str
    text: str

    def __str__(self) -> str:
        return self.text


@contextlib.contextmanager
def races() -> Iterator[list[Race]]:
    """Look for races between the launches of the block. The list is filled at its end, which synchronizes the devices.

    Set ``TASK_QUEUE_ENABLE=0``: otherwise torch_npu copies from another thread, and copies have no Python stack.

    Example:
        >>> with emulated_cann.races() as found:
        ...     step()
        >>> assert not found, found[0].text
    """
    library = native_library()
    synchronize()
    found: list[Race] = []
    before = library.emulated_cann_races(1)
    known = len(_found())
    try:
        yield found
        synchronize()
    finally:
        library.emulated_cann_races(before)
        found += _found()[known:]


def _found() -> list[Race]:
    return [Race(**each) for each in json.loads(native_library().emulated_cann_races_found())]
