"""Streams and events: an order of work on a device, and points in that order.

The defaults wrap PyTorch's device-generic ``torch.Stream`` and ``torch.Event``. A driver whose device is a PyTorch
accelerator inherits them; one whose device runs everything at once (a CPU) overrides them with no-ops.
"""

from __future__ import annotations

from types import TracebackType

import torch


class Event:
    """A point in a stream's work.

    Lifetime: usable until garbage-collected; recording again moves the point. Threading: record and wait may come from
    different threads.
    """

    def __init__(self, device: torch.device, *, timing: bool = False) -> None:
        self._event = torch.Event(device, enable_timing=timing)

    def record(self, stream: Stream) -> None:
        """Mark the work enqueued on ``stream`` so far."""
        self._event.record(stream.torch)

    def wait(self, stream: Stream) -> None:
        """Make work enqueued on ``stream`` from now on wait until this event is reached; does not block the host."""
        self._event.wait(stream.torch)

    def query(self) -> bool:
        """Whether the marked work has finished. True before the first record."""
        return self._event.query()

    def synchronize(self) -> None:
        """Block the host until the marked work has finished."""
        self._event.synchronize()

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to ``end``; both need ``timing=True`` and must have been reached."""
        return float(self._event.elapsed_time(end._event))


class Stream:
    """A queue of work on one device, run in order, asynchronously to the host and to other streams.

    As a context manager it becomes the current stream of the calling thread. Lifetime: work enqueued is finished even
    if the object is dropped. Threading: may be shared; the order between threads is theirs to arrange.
    """

    def __init__(self, device: torch.device, *, priority: int = 0) -> None:
        self.torch = torch.Stream(device, priority=priority)

    def synchronize(self) -> None:
        """Block the host until all work enqueued so far has finished."""
        self.torch.synchronize()

    def query(self) -> bool:
        """Whether all work enqueued so far has finished."""
        return self.torch.query()

    def wait_stream(self, other: Stream) -> None:
        """Make work enqueued here from now on wait for what is enqueued on ``other`` now."""
        self.torch.wait_stream(other.torch)

    def __enter__(self) -> Stream:
        self.torch.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.torch.__exit__(kind, error, traceback)
