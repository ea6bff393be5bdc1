"""The process-wide lock of graph captures."""

from __future__ import annotations

import threading

from hal.errors import GraphError

CAPTURING = threading.RLock()
"""Held during a capture, and while a runner that captures or compiles is created. Replays do not acquire it."""
_under_way = False
"""Whether the thread that holds the lock is capturing."""


def begin_capturing() -> None:
    """Mark this thread, which holds :data:`CAPTURING`, as capturing.

    Raises:
        GraphError: it is capturing already.
    """
    global _under_way
    if _under_way:
        raise GraphError("a capture began inside another", "end the first capture before beginning the next")
    _under_way = True


def end_capturing() -> None:
    """Mark this thread as not capturing."""
    global _under_way
    _under_way = False


def check_not_capturing() -> None:
    """Raise GraphError if this thread is capturing."""
    if CAPTURING.acquire(blocking=False):  # otherwise another thread holds it
        try:
            if _under_way:
                raise GraphError("close() was called inside a capture", "call close() after the capture has ended")
        finally:
            CAPTURING.release()
