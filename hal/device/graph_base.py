"""The state and replay of a graph, and the methods that a driver implements."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hal.device.capture_lock import CAPTURING
from hal.device.host_values import HostValue, HostValues
from hal.device.memory import out_of_memory_message
from hal.device.stream import Stream
from hal.errors import CaptureError, ClosedError, DeviceError, DeviceOutOfMemory, GraphError, HalError

MEMORY_REMEDY = f"capture fewer sizes: lower compilation.max_capture_size; or {DeviceOutOfMemory.REMEDY}"
"""The remedy of a capture that ran out of memory."""


class GraphBase(ABC):
    """The state of a graph, its replay, and the methods that a driver implements; see :class:`hal.vendor.Graph`."""

    may_refuse: bool = False
    """Whether replays must call :meth:`refusal` first."""

    def __init__(self) -> None:
        self.host_values = HostValues()
        self._outputs: Any = None
        self._captured = False
        self._pool: Any = None
        self._holds = False
        self._closed = False
        self._launching = threading.RLock()  # held during a replay, while nothing may be freed

    def replay(self, **host_values: HostValue) -> None:
        """Repeat the launches, with ``host_values`` in place of those of the capture.

        Raises:
            HostValueError: a name is unknown or missing, or a shape or dtype differs. Nothing was launched.
            GraphError: the graph has no capture.
            ClosedError: the graph, or its backend, is closed.
        """
        with self._launching:
            self._require_capture("replay")
            values = self.host_values.check(host_values)
            with torch.inference_mode():
                self._launch(values)

    def refusal(self, host_values: Mapping[str, HostValue]) -> str | None:
        """Return why the graph cannot replay ``host_values`` of valid names and shapes, or None if it can.

        A driver whose captured launches are valid for some values only overrides it, and sets ``may_refuse``.
        """
        return None

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
        if reserve_outputs and type(self)._release_outputs is GraphBase._release_outputs:
            raise GraphError(
                f"{type(self).__name__} does not support reserve_outputs=True",
                'set compilation.compiler to "graph" or "eager", or report it to the driver\'s vendor',
            )

    def _require_capture(self, what: str) -> None:
        if not self._captured:
            self._check_open(what)
            raise GraphError(f"{what} was called on a graph without a capture", "call capture() first")

    def _failure(self, error: BaseException, raised: BaseException | None) -> tuple[BaseException, BaseException]:
        """Return the exception that a failed capture raises, and its cause; both are equal if it propagates unchanged.

        Args:
            error: the exception that ended the capture.
            raised: the exception of the captured function, if any.
        """
        first = raised if raised is not None and isinstance(error, Exception) else error
        if first is not error:
            first.add_note(f"ending the capture then failed: {type(error).__name__}: {error}")
        cause = first
        while isinstance(cause, DeviceError) and cause.__cause__ is not None:  # find the vendor's exception
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
            "run the function eagerly; if that succeeds, report the failure to the driver's vendor",
        ), first

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
        """End a failed capture, within its context, so that others can begin. ``_release`` is called next.

        ``_begin`` or ``_end`` may have raised before, at any point.
        """

    @abstractmethod
    def _launch(self, host_values: Mapping[str, Tensor]) -> None:
        """Replay with validated host values. Copy the required values before returning."""

    def _release_outputs(self) -> None:  # noqa: B027 (optional for drivers)
        """Release the outputs' memory, which ``_end`` reserved if ``self._holds``. Optional."""

    @abstractmethod
    def _release(self) -> None:
        """Free the resources of a capture, complete or failed."""
