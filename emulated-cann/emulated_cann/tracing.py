"""Traces of all launches of the process. They require that the emulated CANN is active."""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

import attrs

from .control import native_library

Kind = Literal["kernel", "copy", "fill", "graph", "update", "prefetch", "host"]
Phase = Literal["eager", "capture", "replay"]


@attrs.frozen
class Operand:
    """A tensor that a launch accesses.

    Attributes:
        shape: the shape.
        dtype: torch's name of the dtype, or that of CANN without ``ACL_``, in lower case.
        bytes: the bytes from its first element to its last, including gaps.
        access: the kernel's access: read, write or read_write.
    """

    shape: tuple[int, ...]
    dtype: str
    bytes: int
    access: str


@attrs.frozen
class Record:
    """An entry of a trace: work that a stream ran, or that a capture recorded.

    Attributes:
        kind: kernel, copy, fill, graph (a replay), update (of a task group), prefetch or
            host (a function).
        name: for a kernel, its aclnn name without the prefix.
        stream: the stream's number; -1 for a copy or fill on the host.
        device: the device's number.
        phase: eager, replay, or capture, in which work is recorded but does not run.
        graph: in a replay, the number of the graph; 0 otherwise.
        bytes: the total bytes of the operands, or the bytes copied.
        flops: floating-point operations; 0 if they are not counted.
        start: when the work began, in microseconds of the machine's monotonic clock.
        microseconds: the duration of the work; 0 in a capture.
        operands: the tensors of a kernel, in the order of its arguments.
        communicator: for a collective, the name of its communicator.
        rank: for a collective, the rank in the communicator.
        ranks: for a collective, the number of ranks; 0 otherwise.
    """

    kind: Kind
    name: str
    stream: int
    device: int
    phase: Phase
    graph: int
    bytes: int
    flops: float
    start: float
    microseconds: float
    operands: tuple[Operand, ...]
    communicator: str | None = None
    rank: int | None = None
    ranks: int = 0


class Trace:
    """The work that ran in a block of :func:`trace`, in the order of completion."""

    def __init__(self) -> None:
        self._final: list[Record] | None = None

    @property
    def records(self) -> list[Record]:
        """All records so far. Unfinished work is missing: synchronize first."""
        return _records() if self._final is None else self._final

    def ran(self, kind: Kind = "kernel", phase: Phase | None = None) -> list[Record]:
        """Return the records of a kind that ran (eager or replay), or those of one phase, which may be ``capture``."""
        wanted = ("eager", "replay") if phase is None else (phase,)
        return [each for each in self.records if each.kind == kind and each.phase in wanted]

    def counts(self, kind: Kind = "kernel", phase: Phase | None = None) -> Counter[str]:
        """Return how often each kernel ran, by name; see :meth:`ran`."""
        return Counter(each.name for each in self.ran(kind, phase))


@contextlib.contextmanager
def trace() -> Iterator[Trace]:
    """Record every launch in the block. Its end synchronizes the devices, so that the trace is complete.

    Example:
        >>> with emulated_cann.trace() as trace:
        ...     y = x + x
        >>> trace.counts()
        Counter({'Add': 1})
    """
    library = native_library()
    result = Trace()
    library.emulated_cann_trace(1)
    try:
        yield result
        synchronize()
    finally:
        library.emulated_cann_trace(0)
        result._final = _records()


def _records() -> list[Record]:
    return [_record(each) for each in json.loads(native_library().emulated_cann_trace_records())]


def _record(found: dict[str, Any]) -> Record:
    operands = tuple(
        Operand(tuple(each["shape"]), each["dtype"], each["bytes"], each["access"]) for each in found.pop("operands")
    )
    return Record(**found, operands=operands)


def synchronize() -> None:
    """Wait for every device through torch_npu, whose queue may hold launches."""
    npu = getattr(sys.modules.get("torch"), "npu", None)
    if npu is not None and npu.is_initialized() and not npu.is_current_stream_capturing():
        for device in range(npu.device_count()):
            npu.synchronize(device)
