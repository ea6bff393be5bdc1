"""Controls that hardware lacks: faults on demand, deterministic schedules, counts of handles.

They act on the whole process, and require that the emulated CANN is active.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Any

import attrs

from .errors import EmulationError


@functools.cache
def native_library() -> ctypes.CDLL:
    """Return the emulated CANN's library, with signatures for its additional functions.

    Raises:
        EmulationError: the emulated CANN is not active in this process.
    """
    # The SONAME resolves to the loaded library. A real CANN has the same SONAME, but lacks these functions.
    try:
        library = ctypes.CDLL("libascendcl.so")
        library.emulated_cann_trace  # noqa: B018
    except (OSError, AttributeError) as error:
        raise EmulationError(
            "the emulated CANN is not active in this process",
            "call emulated_cann.activate(), or run under `emulated-cann run`",
        ) from error
    number, text, long = ctypes.c_int, ctypes.c_char_p, ctypes.c_int64
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "emulated_cann_set": (number, [text, text]),
        "emulated_cann_get": (long, [text]),
        "emulated_cann_trace": (None, [number]),
        "emulated_cann_trace_records": (text, []),
        "emulated_cann_races": (number, [number]),
        "emulated_cann_races_found": (text, []),
        "emulated_cann_arm": (number, [text, text, long, long, number, number]),
        "emulated_cann_disarm": (long, [number]),
        "emulated_cann_seed": (None, [number, ctypes.c_uint64]),
        "emulated_cann_live": (long, [text]),
        "emulated_cann_memory": (long, [number, number]),
        "emulated_cann_launch": (number, [ctypes.c_void_p, text, ctypes.c_void_p, number, ctypes.c_void_p, long]),
        "emulated_cann_dropped": (long, []),
        "emulated_cann_backing": (ctypes.c_void_p, [ctypes.c_void_p]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


HANDLES = ("stream", "captured", "event", "graph", "group", "task", "allocation", "pinned")

OUT_OF_STREAMS = 207008
AICORE_EXCEPTION = 507015
LAUNCH_FAILED = 507000


@attrs.frozen
class Fault:
    """A fault of a ``with`` block."""

    _struck: list[int]

    @property
    def struck(self) -> int:
        """How often the fault struck; available after its block.

        Raises:
            EmulationError: the block has not ended.
        """
        if not self._struck:
            raise EmulationError("`struck` is available only after the fault's block", "read it after the `with` block")
        return self._struck[0]


@contextlib.contextmanager
def _armed(kind: str, kernel: str, first: int, count: int | None, code: int = 0, seconds: float = 0) -> Iterator[Fault]:
    if first < 1 or (count is not None and count < 1):
        raise ValueError(f"first and count must be at least 1, not first={first}, count={count}")
    library = native_library()
    number = library.emulated_cann_arm(kind.encode(), kernel.encode(), first, count or 0, code, round(seconds * 1000))
    fault = Fault([])
    try:
        yield fault
    finally:
        fault._struck.append(library.emulated_cann_disarm(number))


class faults:  # noqa: N801  (a namespace: emulated_cann.faults.allocation())
    """Context managers that inject faults. ``first`` counts from 1; a ``count`` of None has no limit."""

    @staticmethod
    def allocation(first: int = 1, count: int | None = None) -> contextlib.AbstractContextManager[Fault]:
        """Make allocations of device memory fail. torch_npu then frees its cache and retries once."""
        return _armed("malloc", "", first, count)

    @staticmethod
    def launch(
        kernel: str = "", first: int = 1, count: int | None = 1, code: int = LAUNCH_FAILED
    ) -> contextlib.AbstractContextManager[Fault]:
        """Make launches of one kernel, or of any, fail with ``code``.

        As on hardware, torch_npu's queue thread stops at a failed launch, and silently drops all later launches. Set
        ``TASK_QUEUE_ENABLE=0`` if the process continues afterwards.
        """
        return _armed("launch", kernel, first, count, code)

    @staticmethod
    def execution(
        kernel: str = "", first: int = 1, count: int | None = 1, code: int = AICORE_EXCEPTION
    ) -> contextlib.AbstractContextManager[Fault]:
        """Make kernels fail while they run. The host's next wait raises the error."""
        return _armed("execution", kernel, first, count, code)

    @staticmethod
    def hang(
        kernel: str = "", seconds: float = 1.0, first: int = 1, count: int | None = 1
    ) -> contextlib.AbstractContextManager[Fault]:
        """Make kernels hang for ``seconds``, or until the block ends, and then fail with a timeout."""
        return _armed("hang", kernel, first, count, seconds=seconds)

    @staticmethod
    def delay(
        kernel: str = "", seconds: float = 1.0, first: int = 1, count: int | None = 1
    ) -> contextlib.AbstractContextManager[Fault]:
        """Delay kernels by ``seconds``, or until the block ends. Their results are correct."""
        return _armed("delay", kernel, first, count, seconds=seconds)

    @staticmethod
    def copy(
        first: int = 1, count: int | None = 1, code: int = AICORE_EXCEPTION
    ) -> contextlib.AbstractContextManager[Fault]:
        """Make copies fail with ``code`` while they run."""
        return _armed("copy", "", first, count, code)

    @staticmethod
    def streams(first: int = 1, count: int | None = None) -> contextlib.AbstractContextManager[Fault]:
        """Make creation of streams and captures fail, as if the device had no stream left."""
        return _armed("stream", "", first, count)


def seed(value: int | None) -> None:
    """Set the seed of the order in which streams run; None lets them run freely.

    With a seed, work runs only while a host thread waits, in a random order that the streams allow. The same seed and
    program give the same order, provided that no host thread enqueues work while another waits. The order starts at
    this call; call it again to repeat the order.
    """
    if value is not None and not 0 <= value < 1 << 64:
        raise ValueError(f"a schedule seed must be from 0 to 2**64 - 1, not {value}")
    native_library().emulated_cann_seed(int(value is not None), value or 0)


@contextlib.contextmanager
def schedule(value: int) -> Iterator[None]:
    """Run the block with a schedule seed; see :func:`seed`."""
    seed(value)
    try:
        yield
    finally:
        seed(None)


@contextlib.contextmanager
def limits(*, streams: int | None = None, tasks: int | None = None, stall: int | None = None) -> Iterator[None]:
    """Change limits of every device for the block.

    Args:
        streams: streams per device.
        tasks: the maximum number of tasks in captured graphs.
        stall: seconds, 30 by default. If nothing runs for this time while the host waits, for example because a stream
            waits for an event that is never recorded, the wait fails with 507046. Hardware would hang.
    """
    library = native_library()
    chosen = {
        name: value for name, value in {"streams": streams, "tasks": tasks, "stall": stall}.items() if value is not None
    }
    before = {name: library.emulated_cann_get(name.encode()) for name in chosen}
    try:
        for name, value in chosen.items():
            _set(name, value)
        yield
    finally:
        for name, value in before.items():
            _set(name, value)


def live_handles() -> dict[str, int]:
    """Return the number of live handles of each kind.

    The kinds are streams and events; graphs, task groups, tasks in captured graphs and the streams of captured graphs
    ("captured"); and allocations of device memory and of pinned host memory.
    """
    return {name: native_library().emulated_cann_live(name.encode()) for name in HANDLES}


def memory_in_use(device: int = 0) -> int:
    """Return the bytes allocated on a device, including torch_npu's caches."""
    return int(native_library().emulated_cann_memory(device, 0))


def _set(name: str, value: int) -> None:
    if native_library().emulated_cann_set(name.encode(), str(value).encode()):
        raise ValueError(f"{name} cannot be {value}")
