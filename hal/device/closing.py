"""Closing: what is in use is not taken away, and what is closed says so."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from hal.errors import ClosedError, HalError


class Uses:
    """Counts the calls that use something, as a context manager around each, so that closing waits for them.

    Threading: any thread may enter, and any may close. A call that begins once closing has begun is refused, unless it
    is a part of one that began before.

    Args:
        what: is used, for messages.
        remedy: what to do when it is closed.
    """

    def __init__(self, what: str, remedy: str) -> None:
        self._what, self._remedy = what, remedy
        self._threads: dict[int, int] = {}
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self.ended = False

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._lock:
            if self.ended and me not in self._threads:
                raise self.error()
            self._threads[me] = self._threads.get(me, 0) + 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        me = threading.get_ident()
        with self._lock:
            left = self._threads.pop(me) - 1
            if left:
                self._threads[me] = left
            if self.ended:
                self._changed.notify_all()

    def check_open(self) -> None:
        """Raise ClosedError if it is closed, or being closed."""
        with self:
            pass

    def check_not_mine(self) -> None:
        """Raise ClosedError if a call of this thread uses it: closing would wait for that for good."""
        if threading.get_ident() in self._threads:
            raise ClosedError(f"{self._what} would be closed by a call that uses it", "close it when the call is done")

    def end(self) -> None:
        """Refuse calls from now on, and wait for those of other threads."""
        with self._changed:
            self.ended = True
            while self._threads:
                self._changed.wait()

    def error(self) -> ClosedError:
        """What a use raises once it is closed."""
        return ClosedError(f"{self._what} is closed", self._remedy)


class Closable(ABC):
    """A context manager whose :meth:`close` frees what it holds, at once and only once.

    Args:
        what: it is, for messages.
        remedy: what to do when it is closed.
    """

    def __init__(self, what: str, remedy: str) -> None:
        self.uses = Uses(what, remedy)
        self._closing = threading.RLock()
        self._freeing = self._freed = False

    @property
    def closed(self) -> bool:
        """Whether it is closed, or being closed."""
        return self.uses.ended

    def close(self) -> None:
        """Free everything that it holds, at once. Closing it again does nothing.

        Waits for calls of other threads that use it; those that begin from now on raise ClosedError.

        Raises:
            ClosedError: called by a call that uses it.
            GraphError: called in a captured function.
            DeviceError: the device failed at work that was under way. Everything is freed all the same.
        """
        self._check_closable()
        with self._closing:  # whoever closes it meanwhile waits, and finds it freed
            if self._freed or self._freeing:
                return
            self._freeing = True
            try:
                self.uses.end()
                self._free()
                self._freed = True
            except Exception:  # an interrupt may have left something, and closing again frees that
                self._freed = True
                raise
            finally:
                self._freeing = False

    def __enter__(self) -> Self:
        self.uses.check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except HalError as failed:
            if error is None:
                raise
            error.add_note(f"and closing failed: {failed}")  # what the block raised comes first

    def _check_closable(self) -> None:
        """Raise ClosedError if a call of this thread uses it."""
        self.uses.check_not_mine()

    @abstractmethod
    def _free(self) -> None:
        """Free all that it holds, whatever fails; nobody uses it any more."""
