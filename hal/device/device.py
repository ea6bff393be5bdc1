"""Devices, which hold tensors and run work."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hal.device.memory import MemoryStats
from hal.device.stream import Event, Stream


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

        Args:
            dtype: that of the elements multiplied.

        Returns:
            The function and the number, or None to use torch's matrix product.
        """
        return None
