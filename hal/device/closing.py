"""Closing: :meth:`Closable.close` waits for calls in progress, and later calls raise ClosedError."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from hal.errors import ClosedError, HalError


class Uses:
    """Counts the calls that use a resource, as a context manager around each, so that closing can wait for them.

    Threading: any thread may enter or close. Once closing has begun, a new call raises ClosedError, unless it is nested
    in a call that began before.

    Args:
        what: the name of the resource, for messages.
        remedy: the remedy in ClosedError.
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
        """Raise ClosedError if the resource is closed or being closed."""
        with self:
            pass

    def check_not_in_use_by_this_thread(self) -> None:
        """Raise ClosedError if a call of this thread uses the resource: closing would wait for itself forever."""
        if threading.get_ident() in self._threads:
            raise ClosedError(
                f"a call that uses {self._what} tried to close it", "close it after the call has returned"
            )

    def end(self) -> None:
        """Refuse new calls, and wait for those of other threads."""
        with self._changed:
            self.ended = True
            while self._threads:
                self._changed.wait()

    def error(self) -> ClosedError:
        """Return the error that a call raises after closing."""
        return ClosedError(f"{self._what} is closed", self._remedy)


class Closable(ABC):
    """A context manager whose :meth:`close` frees its resources immediately, once.

    Args:
        what: the name of the object, for messages.
        remedy: the remedy in ClosedError.
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
        """Free all resources. Closing again does nothing.

        Waits for calls of other threads that use them. New calls raise ClosedError.

        Raises:
            ClosedError: called from within a call that uses the object.
            GraphError: called in a captured function.
            DeviceError: work in progress on the device failed. All resources are freed nevertheless.
        """
        self._check_closable()
        with self._closing:  # a concurrent close waits here, and finds it freed
            if self._freed or self._freeing:
                return
            self._freeing = True
            try:
                self.uses.end()
                self._free()
                self._freed = True
            except Exception:  # not BaseException: after an interrupt, another close() frees the rest
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
            error.add_note(f"and closing failed: {failed}")  # the block's exception takes precedence

    def _check_closable(self) -> None:
        """Raise ClosedError if a call of this thread uses the object."""
        self.uses.check_not_in_use_by_this_thread()

    @abstractmethod
    def _free(self) -> None:
        """Free all resources, even if some cannot be freed. Nothing uses them any more."""
