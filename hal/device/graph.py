"""Graphs: a captured sequence of launches, which replays without running its Python code.

Every driver implements this contract of capture and replay:

- ``capture(fn)`` calls ``fn`` and records its launches and the memory that they use. A replay repeats the launches on
  the same memory: change the inputs in place, and read the outputs from the tensors that capture returned.
- Outputs keep their addresses for the graph's lifetime. Graphs that share a pool share memory: the outputs of one are
  valid until the next replay of another. A graph captured with ``reserve_outputs=True`` reserves its outputs' memory
  from later captures until ``release_outputs()``, so that later graphs can read the outputs and replay without
  overwriting them.
- A kernel that reads values on the host takes them as *host values*: CPU tensors that the operation declares with
  ``host=``. Capture records them by argument name. Every replay takes new values by name, checks all names and shapes
  before any launch, and copies the values before it returns.
- An exception of the function leaves ``capture`` unchanged. A failure of the capture itself raises
  :class:`CaptureError` with the cause chained. In both cases the graph is empty, and can capture again.
- ``capture(fn)`` is a begin and an end around ``fn``. :meth:`hal.vendor.Graph.capturing` provides both, to capture
  several graphs from one run of a function. The context of captures (inference mode, a stream, torch modes) is entered
  once, before the first begin. Begin and end enter and exit no context.
- Capture and replay run under ``torch.inference_mode``, as do the caches that they write.
- Threading: a graph belongs to one thread at a time. A process runs one capture at a time; other threads wait.
- Closing a graph, as closing its backend does, waits for a replay or capture of another thread. A closed graph holds
  no memory, and every use raises :class:`ClosedError`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from hal.device.capture_checks import (
    CAPTURING,
    MEMORY_REMEDY,
    begin_capturing,
    check_outputs,
    end_capturing,
    failure_of,
    innermost_modes,
)
from hal.device.device import Stream, out_of_memory_message
from hal.device.host_values import HostValue, HostValues
from hal.errors import CaptureError, ClosedError, GraphError, HalError, HostValueError


class Graph(ABC):
    """One captured graph.

    A driver implements ``_begin``, ``_end``, ``_abandon``, ``_launch``, ``_release`` and ``dump``. It may override
    ``_capture_context`` for the context of captures, ``_release_outputs`` to support ``reserve_outputs``, ``_accept``
    to refuse host values, and ``_explain`` to recognize the vendor's exceptions that are capture failures.
    """

    def __init__(self) -> None:
        self.host_values = HostValues()
        self.host_names: Mapping[str, Tensor] = {}  # of tensors whose name is not that of an operation's argument
        self._outputs: Any = None
        self._pool: Any = None
        self._captured = self._holds = self._closed = False
        self._launching = threading.RLock()  # held during a replay, while nothing may be freed

    def capture(
        self, fn: Callable[[], Any], *, pool: Any = None, stream: Stream | None = None, reserve_outputs: bool = False
    ) -> Any:
        """Call ``fn`` once, and record its launches. Waits for a capture of another thread to end.

        An exception of ``fn`` propagates as the same object, unless the capture causes it: by a synchronizing call, an
        operation that cannot be captured, or no stream or memory left. The driver recognizes these, and raises
        CaptureError. So does a failure at the begin or the end, unless ``fn`` raised before: then its exception has a
        note about the later failure. After any exception the graph is empty and can capture again.

        Args:
            fn: takes no arguments; returns tensors (or a tuple, list or dict of them), whose addresses become fixed.
            pool: another graph's :attr:`pool`, to share its memory.
            stream: the stream to capture on; None lets the driver choose.
            reserve_outputs: reserve the outputs' memory from graphs captured later in this pool, until
                :meth:`release_outputs`.

        Returns:
            The structure that ``fn`` returned, with the tensors that each replay writes.

        Raises:
            CaptureError: ``fn`` cannot be captured; the cause is chained.
            GraphError: the graph has a capture already, or this thread is capturing.
            ClosedError: the graph, or its backend, is closed.
        """
        self._check_empty(reserve_outputs)
        with self.capturing(stream) as captures:
            captures.begin(self, pool=pool, reserve_outputs=reserve_outputs)
            return captures.end(fn())

    @contextmanager
    def capturing(self, stream: Stream | None = None) -> Iterator[Captures]:
        """Capture this graph and others of the backend in turn; see :class:`hal.device.graph.Captures`.

        Entering waits, and exceptions propagate, as in :meth:`capture`, with the block in place of the function. Code
        between two captures runs eagerly, on the capture's stream. A graph whose capture did not end is empty
        afterwards; graphs whose capture ended keep it.

        Args:
            stream: the stream to capture on; None lets the driver choose.
        """
        with CAPTURING:
            captures = Captures(self)
            begin_capturing()
            try:
                self._check_open("capture")  # it may have been closed while this thread waited for the lock
                with torch.inference_mode(), self._capture_context(stream) as context:
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
                end_capturing()

    def plan(self, host_values: Mapping[str, HostValue]) -> Callable[[], Any] | str:
        """Check host values, and return a function that replays the graph with them, or why the graph cannot.

        Nothing is launched. Call the function at most once, before the next plan. It returns :attr:`outputs`.

        Raises:
            HostValueError: a name is unknown or missing, or a shape or dtype differs.
            GraphError: the graph has no capture.
            ClosedError: the graph, or its backend, is closed.
        """
        self._require_capture("replay")
        prepared = self._accept(self.host_values.check(host_values))
        if isinstance(prepared, str):
            return prepared

        def run() -> Any:
            with self._launching, nullcontext() if torch.is_inference_mode_enabled() else torch.inference_mode():
                self._require_capture("replay")
                self._launch(prepared)
                return self._outputs

        return run

    def replay(self, **host_values: HostValue) -> None:
        """Repeat the launches, with ``host_values`` in place of those of the capture.

        Raises:
            HostValueError: the graph cannot replay these values. Nothing was launched.
            HalError: as :meth:`plan`.
        """
        planned = self.plan(host_values)
        if isinstance(planned, str):
            raise HostValueError(f"the graph cannot be replayed: {planned}", "call plan() first, and run it uncaptured")
        planned()

    def release_outputs(self) -> None:
        """Release the memory of the outputs that ``reserve_outputs`` reserved, to graphs captured from now on."""
        self._holds = False
        self._release_outputs()

    def reset(self) -> None:
        """Free the capture and its memory; the graph can then capture again."""
        with self._launching:
            try:
                self._release()
            finally:
                self._outputs = self._pool = None
                self._captured = False
                self.host_values = HostValues()

    def close(self) -> None:
        """Free the capture and its memory permanently. Closing again does nothing."""
        with CAPTURING, self._launching:
            self._closed = True
            self.reset()

    @property
    def outputs(self) -> Any:
        """The outputs of the capture."""
        self._require_capture("outputs")
        return self._outputs

    @property
    def pool(self) -> Any:
        """A handle to the graph's memory, for :meth:`capture` of another graph of the driver."""
        self._require_capture("pool")
        return self._pool

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise ClosedError(f"{what} was called on a closed graph", "capture a new graph, on an open backend")

    def _check_empty(self, reserve_outputs: bool) -> None:
        """Raise GraphError unless a capture can begin, with the given ``reserve_outputs``."""
        self._check_open("capture")
        if self._captured:
            raise GraphError("the graph has a capture already", "call reset() first, or capture another graph")
        if reserve_outputs and type(self)._release_outputs is Graph._release_outputs:
            raise GraphError(
                f"{type(self).__name__} does not support reserve_outputs=True",
                'set compilation.compiler to "graph" or "eager", or report it to the driver\'s vendor',
            )

    def _require_capture(self, what: str) -> None:
        if not self._captured:
            self._check_open(what)
            raise GraphError(f"{what} was called on a graph without a capture", "call capture() first")

    def _explain(self, error: Exception) -> HalError | None:
        """Return the HalError for an exception that PyTorch or the vendor's package raised in a capture.

        Args:
            error: raised by the captured function or by a method of the driver. Its notes describe the end of the
                capture.

        Returns:
            None if the exception is unknown. CaptureError if the capture is the cause, including lack of memory.
            Another HalError, such as DeviceError, replaces only exceptions of the driver's methods. The default
            recognizes torch's out-of-memory exceptions.
        """
        if what := out_of_memory_message(error):
            return CaptureError(f"a capture failed: {what}", MEMORY_REMEDY)
        return None

    @abstractmethod
    def dump(self, path: Path) -> None:
        """Write a readable list of the launches to ``path``."""

    def _capture_context(self, stream: Stream | None) -> AbstractContextManager[Any]:
        """Return the context of captures: the capture stream, torch modes, interceptions of ``hal.ops``.

        It is entered once per ``with`` block, under inference mode. Eager code between captures runs in it too, so
        recorders must pass calls through while no capture is in progress.

        Returns:
            A context manager, whose value is passed to ``_begin``. The default enters nothing.
        """
        return nullcontext()

    @abstractmethod
    def _begin(self, context: Any, pool: Any) -> None:
        """Begin to record the launches of this thread. Must not enter thread-local contexts.

        Args:
            context: the value of ``_capture_context``.
            pool: the pool of another graph of the driver, to share its memory; or None.

        Raises:
            GraphError: the pool is not of this driver.
        """

    @abstractmethod
    def _end(self, outputs: Any) -> tuple[Any, Any]:
        """End the capture. Return the outputs, with the tensors that each replay writes, and the pool.

        Args:
            outputs: tensors, in tuples, lists and dicts. Eager code may continue to use other tensors.
        """

    @abstractmethod
    def _abandon(self) -> None:
        """End a failed capture, so that others can begin. ``_begin`` or ``_end`` may have raised, at any point."""

    def _accept(self, host_values: Mapping[str, Tensor]) -> Any:
        """Return what ``_launch`` takes for checked host values, or, as a text without values, why no replay can."""
        return host_values

    @abstractmethod
    def _launch(self, prepared: Any) -> None:
        """Replay with what ``_accept`` returned. Copy the required host values before returning."""

    def _release_outputs(self) -> None:  # noqa: B027 (optional for drivers)
        """Release the outputs' memory, which ``_end`` reserved if ``self._holds``. Optional."""

    @abstractmethod
    def _release(self) -> None:
        """Free the resources of a capture, complete or failed."""


class Captures:
    """Captures graphs one after another; see :meth:`hal.vendor.Graph.capturing`."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._kind = type(graph)
        self._context: Any = None
        self._modes = innermost_modes()
        self._begun = self._open = False
        self._in_driver = True  # remains True if a method of the driver raises
        self._raised: BaseException | None = None

    def begin(self, graph: Graph, *, pool: Any = None, reserve_outputs: bool = False) -> None:
        """Begin to record the launches of this thread.

        Args:
            graph: an empty graph of the same backend.
            pool: another graph's :attr:`hal.vendor.Graph.pool`, to share its memory.
            reserve_outputs: reserve the outputs' memory from graphs captured later in this pool, until
                :meth:`hal.vendor.Graph.release_outputs`.

        Raises:
            GraphError: the graph has a capture already, or another type; or a capture is in progress.
            CaptureError: a torch mode that was entered in the block is still active.
            ClosedError: the graph, or its backend, is closed.
        """
        self._check_sound()
        if self._open:
            raise GraphError("a capture began inside another", "call end() before the next begin()")
        if type(graph) is not self._kind:
            raise GraphError(
                f"cannot capture a {type(graph).__name__} in a block of {self._kind.__name__} captures",
                "capture it in a separate capturing() block",
            )
        graph._check_empty(reserve_outputs)
        self.check_modes("a capture begins")
        graph.host_values = HostValues(graph.host_names)
        graph._holds = reserve_outputs
        self._graph = graph
        self._begun = self._open = self._in_driver = True
        graph._begin(self._context, pool)
        self._in_driver = False

    def end(self, outputs: Any) -> Any:
        """End the current capture.

        Args:
            outputs: tensors, or tuples, lists and dicts of them. To use an output eagerly afterwards, keep another
                tensor on the same memory: the output tensors may be moved.

        Returns:
            The same structure with the tensors that each replay writes.

        Raises:
            GraphError: no capture is in progress.
            CaptureError: a replay cannot write the outputs, or a torch mode that was entered in the capture is still
                active.
        """
        self._check_sound()
        if not self._open:
            raise GraphError("end() was called while no capture is in progress", "call begin() first")
        graph = self._graph
        check_outputs(outputs)
        self.check_modes("a capture ends")
        self._in_driver = True
        graph._outputs, graph._pool = graph._end(outputs)
        self._open = self._in_driver = False
        graph._captured = True
        return graph._outputs

    def check_modes(self, where: str) -> None:
        """Raise CaptureError if a torch mode that was entered in the block is still active ``where``."""
        for found, expected in zip(innermost_modes(), self._modes, strict=True):
            if found is not expected:
                raise CaptureError(
                    f"the innermost torch mode is {type(found).__name__} where {where}, and must be "
                    f"{'none' if expected is None else type(expected).__name__}: replays do not run in that mode",
                    'exit the mode before, or set compilation.compiler to "eager" or "piecewise"',
                )

    def _entered(self, context: Any) -> None:
        self._context, self._modes, self._in_driver = context, innermost_modes(), False

    def _check_sound(self) -> None:
        if self._in_driver:
            raise GraphError(
                "a capture failed, and the captured code caught the exception", "let the exception leave the block"
            )

    def _check_ended(self) -> None:
        self._check_sound()
        if self._open:
            raise GraphError("a capture was begun but not ended", "call end() with the outputs that replays write")
        self._in_driver = True  # the driver's context exits now

    def _abandon(self, error: BaseException) -> None:
        """End the current capture after ``error``."""
        if not self._in_driver:
            self._raised = error
        if not self._open:
            return
        try:
            self._graph._abandon()
        except Exception as end:
            error.add_note(f"the capture's end: {str(end).strip().partition(chr(10))[0][:300]}")

    def _fail(self, error: BaseException) -> NoReturn:
        """Reset the graph whose capture failed, and raise the error that ``error`` becomes."""
        failure, cause = failure_of(error, self._raised, self._graph._explain)
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
            # These locals form a reference cycle with the exception's traceback, which would keep the capture's memory.
            self._raised = None
            del failure, cause, error
