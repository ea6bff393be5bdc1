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

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from hal.device.captures import Captures, capturing
from hal.device.graph_base import GraphBase
from hal.device.stream import Stream


class Graph(GraphBase):
    """One captured graph.

    A driver implements ``_begin``, ``_end``, ``_abandon``, ``_launch``, ``_release`` and ``dump``. It may override
    ``_capture_context`` for the context of captures, ``_release_outputs`` to support ``reserve_outputs``, and
    ``_explain`` to recognize the vendor's exceptions that are capture failures.
    """

    def capture(
        self, fn: Callable[[], Any], *, pool: Any = None, stream: Stream | None = None, reserve_outputs: bool = False
    ) -> Any:
        """Call ``fn`` once, and record its launches. Waits for a capture of another thread to end.

        An exception of ``fn`` propagates as the same object, whatever its type, including KeyboardInterrupt and
        HalErrors. The exception is a failure that the capture causes: a synchronizing call, an operation that cannot be
        captured, or no stream or memory left. The driver recognizes these by the vendor's exceptions, and raises
        CaptureError. A failure at the begin or the end of the capture also raises CaptureError, unless ``fn`` raised
        before: then its exception propagates, with a note about the later failure.

        After any exception the graph is empty and can capture again, and the capture's stream and lock are released.

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

    def capturing(self, stream: Stream | None = None) -> AbstractContextManager[Captures]:
        """Return a context manager to capture this graph and others of the backend in turn.

        ::

            with first.capturing() as captures:
                captures.begin(first)
                made = captures.end(x + 1)
                ...  # runs eagerly, on the capture's stream
                captures.begin(second, pool=first.pool)
                captures.end(x * 2)

        Entering waits, and exceptions propagate, as in :meth:`capture`, with the block in place of the function. A
        graph whose capture did not end is empty afterwards; graphs whose capture ended keep it.

        Args:
            stream: the stream to capture on; None lets the driver choose.
        """
        return capturing(self, stream)
