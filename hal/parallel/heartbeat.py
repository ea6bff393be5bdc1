"""A heartbeat between ranks that do not step together: one that has finished waits for those that have not."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

from hal.device.group import Group
from hal.errors import CommunicationError
from hal.parallel.host_values import check_host_group, gather_numbers

INTERVAL = 1.0
"""Seconds between two beats; a quarter of the group's timeout, if that is less."""
RUNNING, FINISHED, FAILED = range(3)
"""What a rank says of itself in a beat."""


class Heartbeat:
    """A block of work whose end waits for the other ranks of a group, however long they take.

    A thread tells the other ranks that this one still runs.

    Args:
        group: a group whose collectives take CPU tensors. Every rank enters the block, and uses the group for nothing
            else in it.

    Raises:
        ConfigError: the process group does not carry CPU tensors.
        CommunicationError: at the end of the block, if another rank raised in it, has ended, or did not answer within
            the group's timeout.
    """

    def __init__(self, group: Group) -> None:
        check_host_group(group)
        self._group, self._interval = group, min(INTERVAL, group.timeout / 4)
        self._state, self._ended = RUNNING, threading.Event()
        self._error: CommunicationError | None = None
        self._thread = threading.Thread(target=self._beat, name="hal-heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._state = FINISHED if error is None else FAILED
        self._ended.set()
        # A rank that failed tells the others, but does not wait for one that hangs.
        self._thread.join(None if error is None else 2 * self._interval)
        if error is None and self._error is not None:
            raise self._error

    def _beat(self) -> None:
        try:
            states = [RUNNING]
            while set(states) != {FINISHED}:
                self._ended.wait(self._interval)
                states = [state for (state,) in gather_numbers(self._group, [self._state])]
                if FAILED in states:  # All ranks see the same states, so that all threads end.
                    raise CommunicationError(
                        f"rank {states.index(FAILED)} of {self._group.size} raised an exception while rank "
                        f"{self._group.rank} was at work or waited for it",
                        "look for the exception of that rank",
                    )
        except CommunicationError as error:
            self._error = error
