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
- What cannot be captured raises :class:`CaptureError`, and leaves the graph as if never captured.
- Both run under ``torch.inference_mode``, as the caches that they write do.
- Threading: a graph belongs to one thread at a time. One capture runs in a process at a time; another thread's waits.
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

from hal.errors import CaptureError, GraphError, HostValueError, nearest
from hal.stream import Stream

HostValue = Tensor | Sequence[int]
CAPTURING = threading.RLock()
"""Held during a capture, and while a runner that captures or compiles is made. No replay takes it."""


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

    One that shall capture in pieces, which ``hold`` is for, implements ``_let_go`` too.
    """

    _capturing: ClassVar[bool] = False

    def __init__(self) -> None:
        self.host_values = HostValues()
        self._outputs: Any = None
        self._captured = False
        self._pool: Any = None
        self._holds = False

    def capture(
        self, fn: Callable[[], Any], *, pool: Any = None, stream: Stream | None = None, hold: bool = False
    ) -> Any:
        """Call ``fn`` once, recording what it launches. Waits for a capture of another thread to end.

        Args:
            fn: takes nothing; returns tensors (or a tuple, list or dict of them), whose addresses then stay.
            pool: another graph's :attr:`pool`, to share its memory.
            stream: where to capture; None takes one of the driver's choosing.
            hold: keep the outputs' memory from graphs captured later in this pool, until :meth:`let_go`.

        Returns:
            What ``fn`` returned, made of the tensors that each replay fills.

        Raises:
            CaptureError: something in ``fn`` cannot be captured, with the reason and a remedy.
        """
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
            self.host_values = HostValues()
            self._holds = hold
            Graph._capturing = True
            try:
                with torch.inference_mode():
                    self._outputs, self._pool = self._capture(lambda: _checked(fn()), pool, stream)
            except BaseException:
                self.reset()
                raise
            finally:
                Graph._capturing = False
        self._captured = True
        return self._outputs

    def replay(self, **host_values: HostValue) -> None:
        """Launch everything again, reading ``host_values`` in place of those of the capture.

        Raises:
            HostValueError: a name is unknown or missing, or a shape or dtype differs. Nothing was launched.
        """
        self._require_capture("replay")
        values = self.host_values.check(host_values)
        with torch.inference_mode():
            self._launch(values)

    def let_go(self) -> None:
        """Let graphs that are captured from now on have the memory of the outputs that ``hold`` kept."""
        self._holds = False
        self._let_go()

    def reset(self) -> None:
        """Drop the capture and its memory; the graph can then capture again."""
        self._release()
        self._outputs = self._pool = None
        self._captured = False
        self.host_values = HostValues()

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

    def _require_capture(self, what: str) -> None:
        if not self._captured:
            raise GraphError(f"{what} was asked of a graph that holds no capture", "call capture() first")

    @abstractmethod
    def dump(self, path: Path) -> None:
        """Write a readable listing of the launches to ``path``."""

    @abstractmethod
    def _capture(self, fn: Callable[[], Any], pool: Any, stream: Stream | None) -> tuple[Any, Any]:
        """Capture ``fn``; return its outputs and the pool."""

    @abstractmethod
    def _launch(self, host_values: Mapping[str, Tensor]) -> None:
        """Replay with host values that passed the check; copy what is needed of them before returning."""

    def _let_go(self) -> None:  # noqa: B027 (a driver may do without)
        """Stop keeping the outputs' memory, which ``_capture`` kept if ``self._holds``. Drivers may leave it out."""

    @abstractmethod
    def _release(self) -> None:
        """Drop what a capture, whole or broken off, holds."""


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
