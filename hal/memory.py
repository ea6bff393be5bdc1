"""Memory of a device: what is in use, what was in use at most, what there is."""

from __future__ import annotations

import attrs


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
