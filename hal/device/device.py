"""Devices, which hold tensors and run work; their streams and events, and their memory.

Events and streams wrap PyTorch's device-generic ``torch.Event`` and ``torch.Stream``. A driver for an accelerator of
PyTorch inherits them. A driver for a synchronous device, such as a CPU, overrides them with no-ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import attrs
import torch
from torch import Tensor

from hal.errors import DriverError

_HOST_ALLOCATOR = "DefaultCPUAllocator: "


@attrs.frozen
class MemoryStats:
    """A snapshot of a device's memory, in bytes.

    Attributes:
        allocated: used by tensors of this process (on the CPU: the process's resident memory).
        peak: the maximum of ``allocated``.
        reserved: reserved on the device by this process, including ``allocated``.
        free: free on the device, for all processes.
        total: the device's total memory.
    """

    allocated: int
    peak: int
    reserved: int
    free: int
    total: int


def out_of_memory_message(error: BaseException) -> str:
    """Return the message of a device's or the host's out-of-memory exception; empty for any other exception."""
    if isinstance(error, torch.OutOfMemoryError):
        return f"the device has no memory left: {str(error).strip().partition(chr(10))[0]}"
    # The host allocator raises a plain RuntimeError.
    if type(error) is not RuntimeError or _HOST_ALLOCATOR not in str(error):
        return ""
    return f"the CPU has no memory left: {str(error).partition(_HOST_ALLOCATOR)[2].partition('. Error code')[0]}"


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


class Device:
    """One device of a backend, over PyTorch's device-generic runtime (``torch.accelerator``).

    A vendor whose device is a PyTorch accelerator uses this class unchanged. Others override the methods that differ.

    Args:
        device: the torch device, with its index.
        name: a readable name, such as the product's name.
    """

    def __init__(self, device: torch.device, name: str = "") -> None:
        self.torch = device
        self.name = name or str(device)

    def __repr__(self) -> str:
        return f"Device({str(self.torch)!r}, {self.name!r})"

    def stream(self, *, priority: int = 0) -> Stream:
        """Return a new stream; a lower number is a higher priority, as in torch."""
        return Stream(self.torch, priority=priority)

    def event(self, *, timing: bool = False) -> Event:
        """Return a new event; ``timing=True`` enables :meth:`Event.elapsed_time`."""
        return Event(self.torch, timing=timing)

    def synchronize(self) -> None:
        """Block the host until all work enqueued on the device has finished."""
        torch.accelerator.synchronize(self.torch)

    def memory_stats(self) -> MemoryStats:
        """Return the current, peak and free memory."""
        stats = torch.accelerator.memory_stats(self.torch)
        free, total = torch.accelerator.get_memory_info(self.torch)
        return MemoryStats(
            allocated=stats.get("allocated_bytes.all.current", 0),
            peak=stats.get("allocated_bytes.all.peak", 0),
            reserved=stats.get("reserved_bytes.all.current", 0),
            free=free,
            total=total,
        )

    def reset_peak(self) -> bool:
        """Restart the peak of :meth:`memory_stats` from current use. Return False if the device does not support it."""
        torch.accelerator.reset_peak_memory_stats(self.torch)
        return True

    def empty_cache(self) -> None:
        """Return unused memory of the allocator's cache to the device."""
        torch.accelerator.empty_cache()

    def give_back(self, tensors: Iterable[Tensor]) -> int | None:
        """Return the memory of tensors to the system, and keep their addresses, which graphs read.

        Until they are written again, the tensors have unspecified values. Nothing may read them meanwhile.

        Returns:
            The bytes that were returned; None if the device cannot keep addresses. Then nothing was returned, and a
            runner that sleeps frees the tensors, and captures its graphs again when it wakes.
        """
        return None

    def reading(self, buffer: Tensor) -> Callable[[], object] | None:
        """Return a function that reads a contiguous tensor as fast as the driver's kernels may.

        ``hal bench`` measures its floor with it, or with one of torch's reductions if that is faster.

        Returns:
            The function, or None to use torch's reductions only.
        """
        return None

    def multiplying(self, dtype: torch.dtype) -> tuple[Callable[[], object], int] | None:
        """Return a function that multiplies and adds at the device's highest rate, and its number of operations.

        ``hal bench`` measures its floor with it.

        Returns:
            The function and the number, or None to use torch's matrix product.
        """
        return None


DEFAULT_BLOCK_SIZE = 64
"""Tokens per block of a cache, if neither the configuration nor the backend specifies a size."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that operations declare tolerances for, and that configurations can name."""

CACHE_DTYPES = ("int8", "fp8")
"""The values of ``cache.dtype`` that quantize a cache."""


def _tuple_of(what: str, remedy: str, right: Callable[[Any], bool], least: int = 0) -> Callable[..., None]:
    """Return an attrs validator of a tuple of at least so many values, each of which is right."""

    def check(limits: Limits, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not (isinstance(value, tuple) and len(value) >= least and all(map(right, value))):
            raise DriverError(f"the limits of a backend have {attribute.name}={value!r}, not a tuple of {what}", remedy)

    return check


_dtypes = _tuple_of(
    "supported dtypes", f"use a tuple of one or more of {', '.join(map(str, DTYPES))}", lambda each: each in DTYPES, 1
)
_cache_dtypes = _tuple_of(
    "dtypes of quantized caches",
    f"use a tuple of some of {', '.join(map(repr, CACHE_DTYPES))}",
    lambda each: each in CACHE_DTYPES,
)
_schemes = _tuple_of(
    "names of quantization schemes", 'use a tuple of names, such as ("fp8",)', lambda each: isinstance(each, str)
)
_sizes = _tuple_of(
    "positive integers",
    "use a tuple of positive integers, such as (64, 128)",
    lambda each: type(each) is int and each > 0,
)


def _count(limits: Limits, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Validate a number, which is 1 or more, or ``max_streams``, which is 0 or more, or None."""
    least, none = (1, "") if attribute.name != "max_streams" else (0, ", or None for no limit")
    if not ((none and value is None) or (type(value) is int and value >= least)):
        raise DriverError(
            f"the limits of a backend have {attribute.name}={value!r}", f"use an integer of at least {least}{none}"
        )


@attrs.frozen
class Limits:
    """The limits of a backend, constant for its lifetime. Invalid values raise :class:`~hal.errors.DriverError`.

    Attributes:
        dtypes: the dtypes of weights, activations and caches.
        block_sizes: supported block sizes of the KV cache, the preferred one first; empty if any is supported.
        head_dims: head dimensions that attention supports; empty if any is supported.
        cache_dtypes: the values of ``cache.dtype``, ``int8`` and ``fp8``, for which the backend has kernels.
        requantized: the quantization schemes whose weights ``quantized_weights`` ``auto`` converts to ``w8a8_dynamic``
            at load, because kernels would widen them in each step.
        group_multiple: what the sizes of the groups of packed weights are a multiple of, in kernels that do not widen
            the weights in each step. Layers of GGUF files with other groups are dequantized at load.
        max_streams: the number of streams that all graphs together may use; None for no limit.
        streams_per_graph: the number of streams that a graph without forks uses.
        capture_sizes: the default decode batch sizes to capture, ascending.
    """

    dtypes: tuple[torch.dtype, ...] = attrs.field(default=DTYPES, validator=_dtypes)
    block_sizes: tuple[int, ...] = attrs.field(default=(), validator=_sizes)
    head_dims: tuple[int, ...] = attrs.field(default=(), validator=_sizes)
    cache_dtypes: tuple[str, ...] = attrs.field(default=(), validator=_cache_dtypes)
    requantized: tuple[str, ...] = attrs.field(default=(), validator=_schemes)
    group_multiple: int = attrs.field(default=1, validator=_count)
    max_streams: int | None = attrs.field(default=None, validator=_count)
    streams_per_graph: int = attrs.field(default=1, validator=_count)
    capture_sizes: tuple[int, ...] = attrs.field(default=(1, 2, 4, 8, 16, 32), validator=_sizes)


UNLIMITED = Limits()
"""Limits that restrict nothing."""


def to_device(values: Any, device: torch.device) -> Tensor:
    """Return numbers of the host as a tensor on a device, for what an engine sends in each step.

    The copy is from pinned memory and ordered on the current stream, so the host does not wait for the device's work.

    Args:
        values: a CPU tensor, an array, or a sequence of numbers of any depth. The dtype stays.
        device: the device. On the CPU, a tensor or an array is returned without a copy.
    """
    tensor = torch.as_tensor(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
