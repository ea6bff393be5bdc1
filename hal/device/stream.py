"""Streams and events: the order of work on a device, and markers in it.

The defaults wrap PyTorch's device-generic ``torch.Stream`` and ``torch.Event``. A driver for a PyTorch accelerator
inherits them. A driver for a synchronous device, such as a CPU, overrides them with no-ops.
"""

from __future__ import annotations

from types import TracebackType

import torch


class Event:
    """A marker in a stream's work.

    Lifetime: usable until garbage-collected; recording again moves the marker. Threading: record and wait may run in
    different threads.
    """

    def __init__(self, device: torch.device, *, timing: bool = False) -> None:
        self._event = torch.Event(device, enable_timing=timing)

    def record(self, stream: Stream | None = None) -> None:
        """Mark the work enqueued on ``stream`` so far, or on the current stream of the calling thread."""
        self._event.record(None if stream is None else stream.torch)

    def wait(self, stream: Stream) -> None:
        """Make work enqueued on ``stream`` from now on wait for this event, without blocking the host."""
        self._event.wait(stream.torch)

    def query(self) -> bool:
        """Return whether the marked work has finished; True before the first recording."""
        return self._event.query()

    def synchronize(self) -> None:
        """Block the host until the marked work has finished."""
        self._event.synchronize()

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds from this event to ``end``. Both need ``timing=True`` and must have been reached."""
        return float(self._event.elapsed_time(end._event))


class Stream:
    """A queue of work on one device, run in order, asynchronously to the host and to other streams.

    As a context manager, it becomes the current stream of the calling thread. Lifetime: enqueued work finishes even if
    the object is deleted. Threading: threads may share it; they arrange the order among themselves.
    """

    def __init__(self, device: torch.device, *, priority: int = 0) -> None:
        self.torch = torch.Stream(device, priority=priority)

    def synchronize(self) -> None:
        """Block the host until all work enqueued so far has finished."""
        self.torch.synchronize()

    def query(self) -> bool:
        """Return whether all work enqueued so far has finished."""
        return self.torch.query()

    def wait_stream(self, other: Stream) -> None:
        """Make work enqueued here from now on wait for the work enqueued on ``other`` so far."""
        self.torch.wait_stream(other.torch)

    def __enter__(self) -> Stream:
        self.torch.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.torch.__exit__(kind, error, traceback)
