"""Memory of a device: what is in use, what was in use at most, what there is."""

from __future__ import annotations

import attrs
import torch

_HOST_ALLOCATOR = "DefaultCPUAllocator: "


@attrs.frozen
class MemoryStats:
    """A snapshot of a device's memory, all in bytes.

    Attributes:
        allocated: in use by tensors of this process (on the CPU: the process's resident memory).
        peak: the most that ``allocated`` has been.
        reserved: held from the device by this process, ``allocated`` included.
        free: still free on the device, for every process.
        total: what the device has.
    """

    allocated: int
    peak: int
    reserved: int
    free: int
    total: int


def lacking_memory(error: BaseException) -> str:
    """What torch's allocators say they lack: of a device, or of the host; empty for any other exception."""
    if isinstance(error, torch.OutOfMemoryError):
        return f"the device has no memory left: {str(error).strip().partition(chr(10))[0]}"
    # The host's has no type of its own.
    if type(error) is not RuntimeError or _HOST_ALLOCATOR not in str(error):
        return ""
    return f"the CPU has no memory left: {str(error).partition(_HOST_ALLOCATOR)[2].partition('. Error code')[0]}"
