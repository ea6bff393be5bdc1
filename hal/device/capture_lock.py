"""The lock of captures: a process runs one at a time."""

from __future__ import annotations

import threading

from hal.errors import GraphError

CAPTURING = threading.RLock()
"""Held during a capture, and while a runner that captures or compiles is made. No replay takes it."""
_under_way = False
"""Whether the thread that holds the lock captures."""


def begin_capturing() -> None:
    """Note that this thread, which holds :data:`CAPTURING`, captures from now on.

    Raises:
        GraphError: it does so already.
    """
    global _under_way
    if _under_way:
        raise GraphError("a capture was begun inside another", "capture one graph after the other")
    _under_way = True


def end_capturing() -> None:
    """Note that the capture of this thread is over."""
    global _under_way
    _under_way = False


def check_not_capturing() -> None:
    """Raise GraphError if a capture is under way in this thread."""
    if CAPTURING.acquire(blocking=False):  # else it is another thread's
        try:
            if _under_way:
                raise GraphError("something was to be closed inside a capture", "close it when the capture is done")
        finally:
            CAPTURING.release()
