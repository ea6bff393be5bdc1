"""What hardware cannot give: faults on demand, a schedule fixed by a seed, counts of handles.

All of it acts on the whole process. Activate the emulated CANN first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import attrs

from hal.errors import DriverError

from .native_library import native_library

HANDLES = ("stream", "captured", "event", "graph", "group", "task", "allocation", "pinned")

OUT_OF_STREAMS = 207008
AICORE_EXCEPTION = 507015
LAUNCH_FAILED = 507000


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
    library = native_library()
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
    native_library().hal_emulator_seed(int(value is not None), value or 0)


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
    library = native_library()
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
    return {name: native_library().hal_emulator_live(name.encode()) for name in HANDLES}


def memory_in_use(device: int = 0) -> int:
    """Bytes allocated on a device, torch_npu's caches included."""
    return int(native_library().hal_emulator_memory(device, 0))


def _set(name: str, value: int) -> None:
    if native_library().hal_emulator_set(name.encode(), str(value).encode()):
        raise ValueError(f"{name} cannot be {value}")
