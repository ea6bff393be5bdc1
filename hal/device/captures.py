"""A sequence of graph captures in one ``with`` block: their shared context, begin, end, and failures."""

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
    """Captures graphs one after another; see :meth:`hal.vendor.Graph.capturing`."""

    def __init__(self, graph: GraphBase) -> None:
        self._graph = graph
        self._kind = type(graph)
        self._context: Any = None
        self._modes = _innermost_modes()
        self._begun = self._open = False
        self._in_driver = True  # remains True if a method of the driver raises
        self._raised: BaseException | None = None

    def begin(self, graph: GraphBase, *, pool: Any = None, reserve_outputs: bool = False) -> None:
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
        graph.host_values = HostValues()
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
        _check_outputs(outputs)
        self.check_modes("a capture ends")
        self._in_driver = True
        graph._outputs, graph._pool = graph._end(outputs)
        self._open = self._in_driver = False
        graph._captured = True
        return graph._outputs

    def check_modes(self, where: str) -> None:
        """Raise CaptureError if a torch mode that was entered in the block is still active ``where``."""
        for found, expected in zip(_innermost_modes(), self._modes, strict=True):
            if found is not expected:
                raise CaptureError(
                    f"the innermost torch mode is {type(found).__name__} where {where}, and must be "
                    f"{'none' if expected is None else type(expected).__name__}: replays do not run in that mode",
                    'exit the mode before, or set compilation.compiler to "eager" or "piecewise"',
                )

    def _entered(self, context: Any) -> None:
        self._context, self._modes, self._in_driver = context, _innermost_modes(), False

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
            # These locals form a reference cycle with the exception's traceback, which would keep the capture's memory.
            self._raised = None
            del failure, cause, error


@contextmanager
def capturing(graph: GraphBase, stream: Stream | None) -> Iterator[Captures]:
    """Enter the context that captures need; see :meth:`hal.vendor.Graph.capturing`."""
    with CAPTURING:
        captures = Captures(graph)
        begin_capturing()
        try:
            graph._check_open("capture")  # it may have been closed while this thread waited for the lock
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
    """Return the innermost dispatch mode and function mode of torch in this thread, or None for each that is absent."""
    dispatch, functions = _get_current_dispatch_mode_stack(), _get_current_function_mode_stack()
    return dispatch[-1] if dispatch else None, functions[-1] if functions else None


def _check_outputs(outputs: Any) -> None:
    """Raise CaptureError for outputs other than tensors in tuples, lists and dicts, which have no fixed address."""
    for leaf in tree_iter(outputs):
        if not isinstance(leaf, Tensor | int | float | None):
            raise CaptureError(
                f"the captured function returned a {type(leaf).__name__}, whose tensors replays would not write",
                "return tensors, or tuples, lists or dicts of them",
            )
