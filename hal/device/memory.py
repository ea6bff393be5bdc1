"""Device memory: statistics, and recognition of out-of-memory exceptions."""

from __future__ import annotations

import attrs
import torch

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
