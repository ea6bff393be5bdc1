"""What hardware cannot give: a trace of every launch, faults on demand, a schedule fixed by a seed, counts of handles.

All of it acts on the whole process. Activate the emulated CANN first.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

import attrs

from hal.errors import DriverError

Kind = Literal["kernel", "copy", "fill", "graph", "update", "prefetch", "host"]
Phase = Literal["eager", "capture", "replay"]
HANDLES = ("stream", "captured", "event", "graph", "group", "task", "allocation", "pinned")

DTYPES = {
    0: "float32", 1: "float16", 2: "int8", 3: "int32", 4: "uint8", 6: "int16", 7: "uint16", 8: "uint32", 9: "int64",
    10: "uint64", 11: "float64", 12: "bool", 16: "complex64", 17: "complex128", 27: "bfloat16", 29: "int4", 30: "uint1",
    33: "complex32", 34: "hifloat8", 35: "float8_e5m2", 36: "float8_e4m3fn", 37: "float8_e8m0fnu",
}  # fmt: skip
"""Names of CANN's data types (aclDataType), torch's where it has them."""

OUT_OF_STREAMS = 207008
AICORE_EXCEPTION = 507015
LAUNCH_FAILED = 507000


@attrs.frozen
class Operand:
    """A tensor that a launch touched.

    Attributes:
        shape: its sizes.
        dtype: torch's name of its type.
        bytes: from its first element to its last, gaps included.
        access: what the kernel may do with it: read, write or read_write.
    """

    shape: tuple[int, ...]
    dtype: str
    bytes: int
    access: str


@attrs.frozen
class Record:
    """Something that a stream ran, or that a capture recorded.

    Attributes:
        kind: kernel, copy, fill, graph (the start of a replay), update (of a task group), prefetch or
            host (a function).
        name: of a kernel, its aclnn name without the prefix.
        stream: the stream's number; -1 for a copy or fill that the host made itself.
        device: the device's number.
        phase: eager; capture, where it was only recorded; or replay.
        bytes: that its operands hold together, or that were copied.
        flops: floating-point operations, 0 where they are not counted.
        microseconds: how long its work took; 0 where that is not measured.
        operands: the tensors of a kernel, in the order of its arguments.
    """

    kind: Kind
    name: str
    stream: int
    device: int
    phase: Phase
    bytes: int
    flops: float
    microseconds: float
    operands: tuple[Operand, ...]


class Trace:
    """What ran in the block of :func:`trace`, in the order in which it ended."""

    def __init__(self) -> None:
        self._final: list[Record] | None = None

    @property
    def records(self) -> list[Record]:
        """All records so far. Work that is still under way is not among them: synchronise first."""
        return _records() if self._final is None else self._final

    def ran(self, kind: Kind = "kernel", phase: Phase | None = None) -> list[Record]:
        """The records of one kind that really ran, or of one phase, ``capture`` included."""
        wanted = ("eager", "replay") if phase is None else (phase,)
        return [each for each in self.records if each.kind == kind and each.phase in wanted]

    def counts(self, kind: Kind = "kernel", phase: Phase | None = None) -> Counter[str]:
        """How often each kernel ran, by name; see :meth:`ran`."""
        return Counter(each.name for each in self.ran(kind, phase))


@contextlib.contextmanager
def trace() -> Iterator[Trace]:
    """Record every launch in the block. At its end the device is synchronised, so that nothing is missing.

    Example:
        >>> with emulator.trace() as trace:
        ...     y = x + x
        >>> trace.counts()
        Counter({'Add': 1})
    """
    library = _library()
    result = Trace()
    library.hal_emulator_trace(1)
    try:
        yield result
        _synchronize()
    finally:
        library.hal_emulator_trace(0)
        result._final = _records()


@attrs.frozen
class Fault:
    """A fault that is armed, or was: :attr:`struck` tells how often it struck."""

    _struck: list[int]

    @property
    def struck(self) -> int:
        """How often the fault struck; known after its block."""
        if not self._struck:
            raise DriverError("how often a fault struck is known after its block", "read `struck` behind the `with`")
        return self._struck[0]


@contextlib.contextmanager
def _armed(kind: str, kernel: str, first: int, count: int | None, code: int = 0, seconds: float = 0) -> Iterator[Fault]:
    if first < 1 or (count is not None and count < 1):
        raise ValueError(f"faults are counted from 1 on: first={first}, count={count}")
    library = _library()
    number = library.hal_emulator_arm(kind.encode(), kernel.encode(), first, count or 0, code, round(seconds * 1000))
    fault = Fault([])
    try:
        yield fault
    finally:
        fault._struck.append(library.hal_emulator_disarm(number))


class faults:  # noqa: N801  (a namespace: emulator.faults.allocation())
    """Faults on demand, as context managers. ``first`` counts from 1; ``count`` None means every one from there on."""

    @staticmethod
    def allocation(first: int = 1, count: int | None = None) -> contextlib.AbstractContextManager[Fault]:
        """Allocations of device memory find none left. torch_npu frees its cache and tries again before it gives up."""
        return _armed("malloc", "", first, count)

    @staticmethod
    def launch(
        kernel: str = "", first: int = 1, count: int | None = 1, code: int = LAUNCH_FAILED
    ) -> contextlib.AbstractContextManager[Fault]:
        """Launches (of one kernel, or of any) are refused with ``code``.

        torch_npu's queue thread stops for good at a refused launch, here as on hardware, and what follows is silently
        left out. A process that shall go on needs ``TASK_QUEUE_ENABLE=0``.
        """
        return _armed("launch", kernel, first, count, code)

    @staticmethod
    def execution(
        kernel: str = "", first: int = 1, count: int | None = 1, code: int = AICORE_EXCEPTION
    ) -> contextlib.AbstractContextManager[Fault]:
        """Kernels are launched and fail while they run; the error surfaces when the host next waits."""
        return _armed("execution", kernel, first, count, code)

    @staticmethod
    def hang(
        kernel: str = "", seconds: float = 1.0, first: int = 1, count: int | None = 1
    ) -> contextlib.AbstractContextManager[Fault]:
        """Kernels hang until their time limit of ``seconds``, and fail then; they also end when the block does."""
        return _armed("hang", kernel, first, count, seconds=seconds)

    @staticmethod
    def delay(
        kernel: str = "", seconds: float = 1.0, first: int = 1, count: int | None = 1
    ) -> contextlib.AbstractContextManager[Fault]:
        """Kernels start ``seconds`` late, or when the block ends, and are right: their stream lags behind."""
        return _armed("delay", kernel, first, count, seconds=seconds)

    @staticmethod
    def copy(
        first: int = 1, count: int | None = 1, code: int = AICORE_EXCEPTION
    ) -> contextlib.AbstractContextManager[Fault]:
        """Copies fail with ``code`` while they run."""
        return _armed("copy", "", first, count, code)

    @staticmethod
    def streams(first: int = 1, count: int | None = None) -> contextlib.AbstractContextManager[Fault]:
        """The device has no stream left, for streams and for captures."""
        return _armed("stream", "", first, count)


def seed(value: int | None) -> None:
    """From here on, let a seed decide the order in which streams run; None lets them run freely again.

    Under a seed nothing runs before a host thread waits, and then whatever may be reordered is. The same seed and the
    same program give the same order, as long as no host thread issues work while another waits. The order holds from
    this call on: call it again to repeat it.
    """
    if value is not None and not 0 <= value < 1 << 64:
        raise ValueError(f"a schedule seed lies in 0 .. 2**64 - 1, unlike {value}")
    _library().hal_emulator_seed(int(value is not None), value or 0)


@contextlib.contextmanager
def schedule(value: int) -> Iterator[None]:
    """Run the block under a schedule seed; see :func:`seed`."""
    seed(value)
    try:
        yield
    finally:
        seed(None)


@contextlib.contextmanager
def limits(*, streams: int | None = None, tasks: int | None = None, stall: int | None = None) -> Iterator[None]:
    """For the block, give every device fewer streams, its captured graphs fewer tasks, the host's waits less patience.

    ``stall`` is in seconds, 30 to begin with: when nothing runs for as long while the host waits, because a stream
    waits for an event that nobody records, the wait fails with 507046. Hardware would hang.
    """
    library = _library()
    chosen = {
        name: value for name, value in {"streams": streams, "tasks": tasks, "stall": stall}.items() if value is not None
    }
    before = {name: library.hal_emulator_get(name.encode()) for name in chosen}
    try:
        for name, value in chosen.items():
            _set(name, value)
        yield
    finally:
        for name, value in before.items():
            _set(name, value)


def live_handles() -> dict[str, int]:
    """How many of each there are.

    Streams and events; graphs, task groups, the tasks in captured graphs and the streams that these hold ("captured");
    and allocations of device memory and of pinned host memory.
    """
    return {name: _library().hal_emulator_live(name.encode()) for name in HANDLES}


def memory_in_use(device: int = 0) -> int:
    """Bytes allocated on a device, torch_npu's caches included."""
    return int(_library().hal_emulator_memory(device, 0))


def _set(name: str, value: int) -> None:
    if _library().hal_emulator_set(name.encode(), str(value).encode()):
        raise ValueError(f"{name} cannot be {value}")


def _records() -> list[Record]:
    return [_record(each) for each in json.loads(_library().hal_emulator_trace_records())]


def _record(found: dict[str, Any]) -> Record:
    operands = tuple(
        Operand(tuple(each["shape"]), DTYPES.get(each["dtype"], "?"), each["bytes"], each["access"])
        for each in found.pop("operands")
    )
    return Record(**found, operands=operands)


def _synchronize() -> None:
    """Wait for every device, through torch_npu: it may hold launches in a queue of its own."""
    npu = getattr(sys.modules.get("torch"), "npu", None)
    if npu is not None and npu.is_initialized() and not npu.is_current_stream_capturing():
        for device in range(npu.device_count()):
            npu.synchronize(device)


@functools.cache
def _library() -> ctypes.CDLL:
    # By its SONAME, which gives the one that is loaded. Real CANN has it too, but none of these functions.
    try:
        library = ctypes.CDLL("libascendcl.so")
        library.hal_emulator_trace  # noqa: B018
    except (OSError, AttributeError) as error:
        raise DriverError(
            "the emulated CANN is not active in this process", "call emulator.activate(), or run under `hal emulate`"
        ) from error
    number, text, long = ctypes.c_int, ctypes.c_char_p, ctypes.c_int64
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "hal_emulator_set": (number, [text, text]),
        "hal_emulator_get": (long, [text]),
        "hal_emulator_trace": (None, [number]),
        "hal_emulator_trace_records": (text, []),
        "hal_emulator_arm": (number, [text, text, long, long, number, number]),
        "hal_emulator_disarm": (long, [number]),
        "hal_emulator_seed": (None, [number, ctypes.c_uint64]),
        "hal_emulator_live": (long, [text]),
        "hal_emulator_memory": (long, [number, number]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
