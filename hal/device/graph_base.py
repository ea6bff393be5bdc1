"""A captured graph without its capture: state, replay, and the methods that a driver implements."""

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
from hal.device.memory import lacking_memory
from hal.device.stream import Stream
from hal.errors import CaptureError, ClosedError, DeviceError, DeviceOutOfMemory, GraphError, HalError

MEMORY_REMEDY = f"capture fewer sizes: lower compilation.max_capture_size; or {DeviceOutOfMemory.REMEDY}"
"""Of a capture that memory is lacking for."""


class GraphBase(ABC):
    """What a graph holds, its replay, and the methods that a driver implements; see :class:`hal.Graph`."""

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
        if hold and type(self)._let_go is GraphBase._let_go:
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
