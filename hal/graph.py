"""Graphs: a captured sequence of launches that replays without the Python that made it.

Contract of capture and replay, for every driver:

- ``capture(fn)`` calls ``fn`` with the launches recorded, on the memory that ``fn`` reads and writes. A replay launches
  the same again, on the same memory: change inputs in place, read outputs from the tensors that capture returned.
- Outputs keep their addresses for the graph's life. Graphs that share a pool share memory: the outputs of one are valid
  until the next replay of another. A graph that was captured with ``hold=True`` keeps the memory of its outputs from
  those that are captured after it, until ``let_go()``: those may read it, and be replayed, without harm to it.
- A kernel that reads values on the host takes them as *host values*: CPU tensors that the operation declares with
  ``host=``. Capture records each, by argument name; every replay takes new ones, by name, and checks all names and
  shapes before it launches anything. Values are copied before the call returns.
- What the function raises comes out of ``capture`` as it was raised. What the capture itself causes comes out as
  :class:`CaptureError`, with the cause chained. Either way the graph is empty, and can capture again.
- Both run under ``torch.inference_mode``, as the caches that they write do.
- Threading: a graph belongs to one thread at a time. One capture runs in a process at a time; another thread's waits.
- Closing a graph, as its backend does when that is closed, waits for a replay or capture of another thread to return.
  A closed graph holds nothing, and every use of it raises :class:`ClosedError`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

from hal.errors import (
    CaptureError,
    ClosedError,
    DeviceError,
    DeviceOutOfMemory,
    GraphError,
    HalError,
    HostValueError,
    nearest,
)
from hal.memory import lacking_memory
from hal.stream import Stream

HostValue = Tensor | Sequence[int]
CAPTURING = threading.RLock()
"""Held during a capture, and while a runner that captures or compiles is made. No replay takes it."""
MEMORY_REMEDY = f"capture fewer sizes: lower compilation.max_capture_size; or {DeviceOutOfMemory.REMEDY}"
"""Of a capture that memory is lacking for."""


def check_not_capturing() -> None:
    """Raise GraphError if a capture is under way in this thread."""
    if CAPTURING.acquire(blocking=False):  # else it is another thread's
        try:
            if Graph._capturing:
                raise GraphError("something was to be closed inside a capture", "close it when the capture is done")
        finally:
            CAPTURING.release()


class HostValues:
    """The host values of one graph: what the capture met, by name, and the check that every replay passes."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def items(self) -> list[tuple[str, Tensor]]:
        """The names, and the tensors that the launches read."""
        return list(self._tensors.items())

    def record(self, name: str, tensor: Tensor, operation: str) -> None:
        """Note that a launch of ``operation`` reads ``tensor`` on the host as its argument ``name``."""
        if tensor.device.type != "cpu":
            raise CaptureError(
                f"{operation} was given {name} on {tensor.device}; a host value must be a CPU tensor",
                "pass the host twin of the tensor, as hal.Batch carries it",
            )
        known = self._tensors.setdefault(name, tensor)
        if known.data_ptr() != tensor.data_ptr() or known.shape != tensor.shape:
            raise CaptureError(
                f"two launches in one capture take different tensors as {name}, so one name cannot update both",
                "pass the same tensor to every operation of the captured function",
            )

    def check(self, values: Mapping[str, HostValue]) -> dict[str, Tensor]:
        """Return ``values`` as tensors fit to be copied; raise HostValueError if any name, shape or dtype is off."""
        for name in values:
            if name not in self._tensors:
                raise HostValueError(
                    f"the graph has no host value {name!r}; {nearest(name, self._tensors)}", "pass the names it has"
                )
        if len(values) < len(self._tensors):
            missing = sorted(set(self._tensors) - set(values))
            raise HostValueError(
                f"the replay lacks the host values {', '.join(missing)}", "pass every host value at every replay"
            )
        return {name: self._fit(name, value) for name, value in values.items()}

    def write(self, values: Mapping[str, Tensor]) -> None:
        """Copy checked ``values`` into the tensors that the launches read."""
        for name, value in values.items():
            self._tensors[name].copy_(value)

    def _fit(self, name: str, value: HostValue) -> Tensor:
        expected = self._tensors[name]
        if not isinstance(value, Tensor):
            if not (isinstance(value, Sequence) and all(type(number) is int for number in value)):
                raise HostValueError(f"host value {name} is {value!r:.70}", "pass a CPU tensor, or a list of integers")
            try:
                value = torch.tensor(value, dtype=expected.dtype)
            except RuntimeError as error:
                raise HostValueError(f"host value {name}: {error}", "pass numbers that its dtype holds") from None
        if not value.is_cpu or value.dtype != expected.dtype or value.shape != expected.shape:
            raise HostValueError(
                f"host value {name} must be {_describe(expected)}, found {_describe(value)}",
                "host values keep the shape and dtype of the capture; pad to the bucket's size",
            )
        return value


class Graph(ABC):
    """One captured graph. A driver implements ``_capture``, ``_launch``, ``_release`` and ``dump``.

    One that shall capture in pieces, which ``hold`` is for, implements ``_let_go`` too; and ``_explain`` says which of
    the vendor's exceptions are failures of a capture.
    """

    _capturing: ClassVar[bool] = False
    may_refuse: bool = False
    """Whether :meth:`refusal` need be asked before a replay."""

    def __init__(self) -> None:
        self.host_values = HostValues()
        self._outputs: Any = None
        self._captured = False
        self._pool: Any = None
        self._holds = False
        self._closed = False
        self._launching = threading.RLock()  # held by a replay, which nothing may be freed under

    def capture(
        self, fn: Callable[[], Any], *, pool: Any = None, stream: Stream | None = None, hold: bool = False
    ) -> Any:
        """Call ``fn`` once, recording what it launches. Waits for a capture of another thread to end.

        An exception of ``fn`` leaves this method unchanged: the same object, whatever its type, KeyboardInterrupt and
        the HalErrors included. The exceptions to this rule are failures that the capture causes: a synchronising call,
        an operation that cannot be captured, no stream or memory left. The driver recognises those by what the
        vendor's package raises, and they become CaptureError. So does whatever fails at the beginning or the end of
        the capture, unless ``fn`` raised before: then its exception comes out, with a note of what followed.

        After any exception the graph is empty and can capture again, and the capture's stream and lock are released.

        Args:
            fn: takes nothing; returns tensors (or a tuple, list or dict of them), whose addresses then stay.
            pool: another graph's :attr:`pool`, to share its memory.
            stream: where to capture; None takes one of the driver's choosing.
            hold: keep the outputs' memory from graphs captured later in this pool, until :meth:`let_go`.

        Returns:
            What ``fn`` returned, made of the tensors that each replay fills.

        Raises:
            CaptureError: something in ``fn`` cannot be captured, with the reason, a remedy and the cause chained.
            GraphError: the graph is captured already, or a capture is under way in this thread.
            ClosedError: the graph, or its backend, is closed.
        """
        self._check_open("capture")
        if self._captured:
            raise GraphError("this graph has been captured already", "call reset() first, or make another graph")
        if hold and type(self)._let_go is Graph._let_go:
            raise GraphError(
                f"{type(self).__name__} cannot hold its outputs while others are captured",
                'use the compiler "graph" or "eager", or ask the driver\'s authors for it',
            )
        with CAPTURING:
            if Graph._capturing:
                raise GraphError("a capture was begun inside another", "capture one graph after the other")
            self._check_open("capture")  # it may have waited for the lock
            self.host_values = HostValues()
            self._holds = hold
            Graph._capturing = True
            watched = _Watched(fn)
            try:
                with torch.inference_mode():
                    self._outputs, self._pool = self._capture(watched, pool, stream)
                if watched.raised is not None:  # and the driver lost it
                    raise watched.raised
            except BaseException as error:
                failure, cause = self._failure(error, watched.raised)
                try:
                    self.reset()
                except Exception as after:
                    failure.add_note(f"the graph could not be reset after that: {type(after).__name__}: {after}")
                try:
                    if failure is error:
                        raise
                    raise failure from (failure.__cause__ if failure is cause else cause)
                finally:
                    # An exception that its own traceback refers to would keep the capture's memory.
                    watched.raised = None
                    del failure, cause
            finally:
                Graph._capturing = False
        self._captured = True
        return self._outputs

    def replay(self, **host_values: HostValue) -> None:
        """Launch everything again, reading ``host_values`` in place of those of the capture.

        Raises:
            HostValueError: a name is unknown or missing, or a shape or dtype differs. Nothing was launched.
            GraphError: nothing was captured.
            ClosedError: the graph, or its backend, is closed.
        """
        with self._launching:
            self._require_capture("replay")
            values = self.host_values.check(host_values)
            with torch.inference_mode():
                self._launch(values)

    def refusal(self, host_values: Mapping[str, HostValue]) -> str | None:
        """Return why no replay can take ``host_values``, beside their names and shapes; None if one can.

        A driver whose launches were captured for some values only overrides it, and sets ``may_refuse``.
        """
        return None

    def let_go(self) -> None:
        """Let graphs that are captured from now on have the memory of the outputs that ``hold`` kept."""
        self._holds = False
        self._let_go()

    def reset(self) -> None:
        """Drop the capture and its memory; the graph can then capture again."""
        with self._launching:
            try:
                self._release()
            finally:
                self._outputs = self._pool = None
                self._captured = False
                self.host_values = HostValues()

    def close(self) -> None:
        """Drop the capture and its memory for good. Closing it again does nothing."""
        with CAPTURING, self._launching:
            self._closed = True
            self.reset()

    @property
    def outputs(self) -> Any:
        """What the captured function returned."""
        self._require_capture("outputs")
        return self._outputs

    @property
    def pool(self) -> Any:
        """A handle on the graph's memory, for :meth:`capture` of another graph of the same driver."""
        self._require_capture("pool")
        return self._pool

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise ClosedError(f"{what} was asked of a graph that is closed", "capture another, on an open backend")

    def _require_capture(self, what: str) -> None:
        if not self._captured:
            self._check_open(what)
            raise GraphError(f"{what} was asked of a graph that holds no capture", "call capture() first")

    def _failure(self, error: BaseException, raised: BaseException | None) -> tuple[BaseException, BaseException]:
        """What a capture that broke raises, and its cause; the same twice for what comes out as it is.

        Args:
            error: what ``_capture`` raised.
            raised: what the function raised, if it did.
        """
        first = raised if raised is not None and isinstance(error, Exception) else error
        if first is not error:
            first.add_note(f"the capture could not be ended after that: {type(error).__name__}: {error}")
        cause = first
        while isinstance(cause, DeviceError) and cause.__cause__ is not None:  # made of the vendor's exception
            cause = cause.__cause__
        if not isinstance(cause, Exception) or isinstance(cause, HalError):
            return first, first
        known = self._explain(cause)
        if isinstance(known, CaptureError):
            return known, first
        if first is raised or isinstance(first, HalError):
            return first, first
        return known or CaptureError(
            f"the capture failed: {type(first).__name__}: {first}",
            "run the function eagerly to see whether the capture is at fault, and report it to the driver's authors",
        ), first

    def _explain(self, error: Exception) -> HalError | None:
        """The typed error for an exception of PyTorch's or the vendor's in a capture, or None if it is not known.

        Args:
            error: raised by the captured function, or by ``_capture`` itself. Notes on it say how the capture ended.

        Returns:
            CaptureError if the capture is the reason, memory that it lacks included. Another HalError, such as
            DeviceError, takes the place of an exception of ``_capture`` only. By default torch's exceptions for
            memory are known.
        """
        if what := lacking_memory(error):
            return CaptureError(f"a capture failed: {what}", MEMORY_REMEDY)
        return None

    @abstractmethod
    def dump(self, path: Path) -> None:
        """Write a readable listing of the launches to ``path``."""

    @abstractmethod
    def _capture(self, fn: Callable[[], Any], pool: Any, stream: Stream | None) -> tuple[Any, Any]:
        """Capture ``fn``, which is called once; return its outputs and the pool.

        Exceptions of ``fn``, and the vendor's own, pass through: :meth:`capture` tells them apart. After one of ``fn``
        the capture is ended all the same.
        """

    @abstractmethod
    def _launch(self, host_values: Mapping[str, Tensor]) -> None:
        """Replay with host values that passed the check; copy what is needed of them before returning."""

    def _let_go(self) -> None:  # noqa: B027 (a driver may do without)
        """Stop keeping the outputs' memory, which ``_capture`` kept if ``self._holds``. Drivers may leave it out."""

    @abstractmethod
    def _release(self) -> None:
        """Drop what a capture, whole or broken off, holds."""


class _Watched:
    """The function to capture, which remembers what it raised."""

    def __init__(self, fn: Callable[[], Any]) -> None:
        self._fn = fn
        self.raised: BaseException | None = None

    def __call__(self) -> Any:
        try:
            return _checked(self._fn())
        except BaseException as error:
            self.raised = error
            raise


def _checked(outputs: Any) -> Any:
    """Outputs that a graph can keep at their addresses: tensors, in tuples, lists and dicts."""
    for leaf in tree_iter(outputs):
        if not isinstance(leaf, Tensor | int | float | None):
            raise CaptureError(
                f"the captured function returned a {type(leaf).__name__}, whose tensors no replay would fill",
                "return tensors, or tuples, lists or dicts of them",
            )
    return outputs


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}"
