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
- ``capture(fn)`` is a begin and an end with ``fn`` between them. :meth:`hal.Graph.capturing` gives both to code that
  captures several graphs from one run of a function. What captures need around them (inference mode, a stream, modes of
  torch) is entered once, before the first begin; a begin and an end enter and leave nothing.
- Both run under ``torch.inference_mode``, as the caches that they write do.
- Threading: a graph belongs to one thread at a time. One capture runs in a process at a time; another thread's waits.
- Closing a graph, as its backend does when that is closed, waits for a replay or capture of another thread to return.
  A closed graph holds nothing, and every use of it raises :class:`ClosedError`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_iter

from hal.device.host_values import HostValue, HostValues
from hal.device.memory import lacking_memory
from hal.device.stream import Stream
from hal.errors import CaptureError, ClosedError, DeviceError, DeviceOutOfMemory, GraphError, HalError

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


class Graph(ABC):
    """One captured graph.

    A driver implements ``_begin``, ``_end``, ``_abandon``, ``_launch``, ``_release`` and ``dump``. ``_capture_context``
    gives what captures need around them, ``_let_go`` is for graphs that can capture in pieces with ``hold``, and
    ``_explain`` says which of the vendor's exceptions are failures of a capture.
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
        self._check_empty(hold)
        with self.capturing(stream) as captures:
            captures.begin(self, pool=pool, hold=hold)
            return captures.end(fn())

    def capturing(self, stream: Stream | None = None) -> AbstractContextManager[Captures]:
        """Enter what captures need around them, for this graph and others of the same backend. Waits as `capture` does.

        ::

            with first.capturing() as captures:
                captures.begin(first)
                made = captures.end(x + 1)
                ...  # runs eagerly, on the capture's stream
                captures.begin(second, pool=first.pool)
                captures.end(x * 2)

        What leaves the block is what :meth:`capture` would raise, the code in the block being its function. A graph
        whose capture was not ended is empty then; those that were ended stay captured.

        Args:
            stream: where to capture; None takes one of the driver's choosing.
        """
        return _capturing(self, stream)

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

    def _check_empty(self, hold: bool) -> None:
        """Raise unless a capture can begin, with ``hold`` or without."""
        self._check_open("capture")
        if self._captured:
            raise GraphError("this graph has been captured already", "call reset() first, or make another graph")
        if hold and type(self)._let_go is Graph._let_go:
            raise GraphError(
                f"{type(self).__name__} cannot hold its outputs while others are captured",
                'use the compiler "graph" or "eager", or ask the driver\'s authors for it',
            )

    def _require_capture(self, what: str) -> None:
        if not self._captured:
            self._check_open(what)
            raise GraphError(f"{what} was asked of a graph that holds no capture", "call capture() first")

    def _failure(self, error: BaseException, raised: BaseException | None) -> tuple[BaseException, BaseException]:
        """What a capture that broke raises, and its cause; the same twice for what comes out as it is.

        Args:
            error: what the capture came to its end with.
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
            error: raised by the captured function, or by one of the driver's methods. Notes on it say how the capture
                was ended.

        Returns:
            CaptureError if the capture is the reason, memory that it lacks included. Another HalError, such as
            DeviceError, takes the place of an exception of the driver's methods only. By default torch's exceptions for
            memory are known.
        """
        if what := lacking_memory(error):
            return CaptureError(f"a capture failed: {what}", MEMORY_REMEDY)
        return None

    @abstractmethod
    def dump(self, path: Path) -> None:
        """Write a readable listing of the launches to ``path``."""

    def _capture_context(self, stream: Stream | None) -> AbstractContextManager[Any]:
        """Give what captures need around them: the stream to capture on, modes of torch, interceptions of ``hal.ops``.

        It is entered once for all captures of a ``with`` block, on which the code between them runs too: what records
        must let everything pass while no capture is under way. Inference mode is entered already.

        Returns:
            A context manager. What it gives is handed to ``_begin``. By default, one that enters nothing.
        """
        return nullcontext()

    @abstractmethod
    def _begin(self, context: Any, pool: Any) -> None:
        """Begin to record what this thread launches. May enter no context that is local to the thread.

        Args:
            context: what ``_capture_context`` gave.
            pool: that of another graph of the driver's, to share its memory; or None.

        Raises:
            GraphError: it is no pool of this driver's.
        """

    @abstractmethod
    def _end(self, outputs: Any) -> tuple[Any, Any]:
        """End the capture; return the outputs, made of the tensors that each replay fills, and the pool.

        Args:
            outputs: tensors, in tuples, lists and dicts. The code that was captured may go on to use others.
        """

    @abstractmethod
    def _abandon(self) -> None:
        """End a capture that is given up, within its context, so that others can begin. ``_release`` is called next.

        ``_begin`` or ``_end`` may have raised before, at any point.
        """

    @abstractmethod
    def _launch(self, host_values: Mapping[str, Tensor]) -> None:
        """Replay with host values that passed the check; copy what is needed of them before returning."""

    def _let_go(self) -> None:  # noqa: B027 (a driver may do without)
        """Stop keeping the outputs' memory, which ``_end`` kept if ``self._holds``. Drivers may leave it out."""

    @abstractmethod
    def _release(self) -> None:
        """Drop what a capture, whole or broken off, holds."""


class Captures:
    """The captures of a block of code, one after the other; see :meth:`hal.Graph.capturing`."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._kind = type(graph)
        self._context: Any = None
        self._modes = _innermost_modes()
        self._begun = self._open = False
        self._in_driver = True  # and so it stays if a method of the driver raises
        self._raised: BaseException | None = None

    def begin(self, graph: Graph, *, pool: Any = None, hold: bool = False) -> None:
        """Begin to record what this thread launches.

        Args:
            graph: an empty one of the same backend.
            pool: another graph's :attr:`hal.Graph.pool`, to share its memory.
            hold: keep the outputs' memory from graphs captured later in this pool, until :meth:`hal.Graph.let_go`.

        Raises:
            GraphError: the graph is captured already, or of another kind; or a capture is under way.
            CaptureError: a mode of torch that was entered in the block is still on.
            ClosedError: the graph, or its backend, is closed.
        """
        self._check_sound()
        if self._open:
            raise GraphError("a capture was begun inside another", "end the first one before")
        if type(graph) is not self._kind:
            raise GraphError(
                f"a {type(graph).__name__} cannot be captured among graphs that are {self._kind.__name__}",
                "capture it in a block of its own",
            )
        graph._check_empty(hold)
        self.check_modes("a capture begins")
        graph.host_values = HostValues()
        graph._holds = hold
        self._graph = graph
        self._begun = self._open = self._in_driver = True
        graph._begin(self._context, pool)
        self._in_driver = False

    def end(self, outputs: Any) -> Any:
        """End the capture that is under way.

        Args:
            outputs: tensors, or tuples, lists and dicts of them. What goes on to use a tensor among them should hold
                another on the same memory: that of the outputs may move.

        Returns:
            The outputs, made of the tensors that each replay fills.

        Raises:
            GraphError: no capture is under way.
            CaptureError: the outputs are none that a replay can fill, or a mode of torch that was entered in the
                capture is still on.
        """
        self._check_sound()
        if not self._open:
            raise GraphError("no capture is under way that could be ended", "begin one before")
        graph = self._graph
        _check_outputs(outputs)
        self.check_modes("a capture ends")
        self._in_driver = True
        graph._outputs, graph._pool = graph._end(outputs)
        self._open = self._in_driver = False
        graph._captured = True
        return graph._outputs

    def check_modes(self, where: str) -> None:
        """Raise CaptureError if a torch mode was entered in the block, and not left ``where``."""
        for found, expected in zip(_innermost_modes(), self._modes, strict=True):
            if found is not expected:
                raise CaptureError(
                    f"the mode {type(found).__name__} is the innermost of torch's where {where}, and must be "
                    f"{'none' if expected is None else type(expected).__name__}: no replay would run in that mode",
                    'leave the mode before, or use the compiler "eager" or "piecewise"',
                )

    def _entered(self, context: Any) -> None:
        self._context, self._modes, self._in_driver = context, _innermost_modes(), False

    def _check_sound(self) -> None:
        if self._in_driver:
            raise GraphError(
                "a capture failed, and the code that was captured caught the exception", "let it leave the block"
            )

    def _check_ended(self) -> None:
        self._check_sound()
        if self._open:
            raise GraphError("a capture was begun and not ended", "call end() with what the replays shall fill")
        self._in_driver = True  # which leaves its context now

    def _abandon(self, error: BaseException) -> None:
        """End the capture that is under way, because of ``error``."""
        if not self._in_driver:
            self._raised = error
        if not self._open:
            return
        try:
            self._graph._abandon()
        except Exception as end:
            error.add_note(f"the capture's end: {str(end).strip().partition(chr(10))[0][:300]}")

    def _fail(self, error: BaseException) -> NoReturn:
        """Empty the graph whose capture broke, and raise what comes of ``error``."""
        failure, cause = self._graph._failure(error, self._raised)
        if self._begun and (self._open or self._in_driver):
            try:
                self._graph.reset()
            except Exception as after:
                failure.add_note(f"the graph could not be reset after that: {type(after).__name__}: {after}")
        try:
            if failure is error:
                raise error
            raise failure from (failure.__cause__ if failure is cause else cause)
        finally:
            # An exception that its own traceback refers to would keep the capture's memory.
            self._raised = None
            del failure, cause, error


@contextmanager
def _capturing(graph: Graph, stream: Stream | None) -> Iterator[Captures]:
    with CAPTURING:
        if Graph._capturing:
            raise GraphError("a capture was begun inside another", "capture one graph after the other")
        graph._check_open("capture")  # it may have waited for the lock
        captures = Captures(graph)
        Graph._capturing = True
        try:
            with torch.inference_mode(), graph._capture_context(stream) as context:
                try:
                    captures._entered(context)
                    yield captures
                    captures._check_ended()
                except BaseException as error:
                    captures._abandon(error)
                    raise
        except BaseException as error:
            captures._fail(error)
        finally:
            Graph._capturing = False


def _innermost_modes() -> tuple[Any, Any]:
    """The modes of torch that see a call first in this thread, of dispatch and of functions; None where none is on."""
    dispatch, functions = _get_current_dispatch_mode_stack(), _get_current_function_mode_stack()
    return dispatch[-1] if dispatch else None, functions[-1] if functions else None


def _check_outputs(outputs: Any) -> None:
    """Raise CaptureError for what a graph cannot keep at its address: all but tensors, in tuples, lists and dicts."""
    for leaf in tree_iter(outputs):
        if not isinstance(leaf, Tensor | int | float | None):
            raise CaptureError(
                f"the captured function returned a {type(leaf).__name__}, whose tensors no replay would fill",
                "return tensors, or tuples, lists or dicts of them",
            )
