"""The captures of a block of code: what is entered around them, each one's begin and end, and how they fail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_iter

from hal.device.capture_lock import CAPTURING, begin_capturing, end_capturing
from hal.device.graph_base import GraphBase
from hal.device.host_values import HostValues
from hal.device.stream import Stream
from hal.errors import CaptureError, GraphError


class Captures:
    """The captures of a block of code, one after the other; see :meth:`hal.Graph.capturing`."""

    def __init__(self, graph: GraphBase) -> None:
        self._graph = graph
        self._kind = type(graph)
        self._context: Any = None
        self._modes = _innermost_modes()
        self._begun = self._open = False
        self._in_driver = True  # and so it stays if a method of the driver raises
        self._raised: BaseException | None = None

    def begin(self, graph: GraphBase, *, pool: Any = None, hold: bool = False) -> None:
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
def capturing(graph: GraphBase, stream: Stream | None) -> Iterator[Captures]:
    """Enter what captures need around them, as :meth:`hal.Graph.capturing` says."""
    with CAPTURING:
        captures = Captures(graph)
        begin_capturing()
        try:
            graph._check_open("capture")  # it may have waited for the lock
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
            end_capturing()


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
