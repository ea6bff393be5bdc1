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

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from hal.device.captures import Captures, capturing
from hal.device.graph_base import GraphBase
from hal.device.stream import Stream


class Graph(GraphBase):
    """One captured graph.

    A driver implements ``_begin``, ``_end``, ``_abandon``, ``_launch``, ``_release`` and ``dump``. ``_capture_context``
    gives what captures need around them, ``_let_go`` is for graphs that can capture in pieces with ``hold``, and
    ``_explain`` says which of the vendor's exceptions are failures of a capture.
    """

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
        return capturing(self, stream)
