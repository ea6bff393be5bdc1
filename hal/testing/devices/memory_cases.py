"""Cases of memory: statistics and out-of-memory errors."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial

import torch

from hal.errors import DeviceOutOfMemory
from hal.testing.case import Case, NotApplicable, require
from hal.testing.target import Target

BYTES = 64 << 20
"""Size of the test tensor, far above other allocations in the process."""


def cases(target: Target) -> Iterator[Case]:
    """Yield ``memory/...``."""
    for name, check in (
        ("statistics", _statistics),
        ("follows", _follows),
        ("peak", _peak),
        ("reset-peak", _reset_peak),
        ("out-of-memory", _out_of_memory),
    ):
        yield Case(f"memory/{name}", partial(check, target))


def _settled(target: Target) -> None:
    gc.collect()
    target.device.synchronize()
    target.device.empty_cache()


def _statistics(target: Target) -> None:
    stats = target.device.memory_stats()
    require(0 <= stats.allocated <= stats.peak, f"allocated is {stats.allocated}, and its peak {stats.peak}")
    require(stats.allocated <= stats.reserved, f"{stats.allocated} bytes are allocated of {stats.reserved} reserved")
    require(0 < stats.free <= stats.total, f"{stats.free} bytes are free of {stats.total}")


def _follows(target: Target) -> None:
    """Check that the statistics include a live tensor, and exclude it after it is dropped."""
    _settled(target)
    before = target.device.memory_stats()
    held = torch.ones(BYTES, dtype=torch.uint8, device=target.device.torch)
    target.device.synchronize()
    during = target.device.memory_stats().allocated - before.allocated
    require(during >= BYTES // 2, f"a tensor of {BYTES} bytes increased `allocated` by {during}")
    del held
    _settled(target)
    left = target.device.memory_stats().allocated - before.allocated
    require(left < BYTES // 2, f"after dropping a tensor of {BYTES} bytes, {left} bytes stay allocated")


def _peak(target: Target) -> None:
    _settled(target)
    before = target.device.memory_stats().allocated
    held = torch.ones(BYTES, dtype=torch.uint8, device=target.device.torch)
    target.device.synchronize()
    del held
    _settled(target)
    peak = target.device.memory_stats().peak
    require(peak >= before + BYTES // 2, f"the peak is {peak}, below {before} bytes plus a tensor of {BYTES}")


def _reset_peak(target: Target) -> None:
    """Check that the peak restarts if reset_peak() returns True, and is kept if it returns False."""
    _settled(target)
    device = target.device
    torch.ones(BYTES, dtype=torch.uint8, device=device.torch)
    device.synchronize()
    if device.reset_peak():
        stats = device.memory_stats()
        require(stats.peak < stats.allocated + BYTES // 2, "reset_peak() returned True, but the peak was kept")
    else:
        stats = device.memory_stats()
        require(stats.peak >= stats.allocated, "reset_peak() returned False, but the peak was lost")


def _out_of_memory(target: Target) -> None:
    """Check that an oversized allocation raises DeviceOutOfMemory, and that the device stays usable."""
    backend = target.activated()
    device = backend.device
    if device.torch.type == "cpu":
        raise NotApplicable("PyTorch has no out-of-memory error for the CPU")
    nbytes = device.memory_stats().total * 4
    found: BaseException | None = None
    try:
        with backend.translating_errors():
            torch.empty(nbytes, dtype=torch.uint8, device=device.torch).fill_(1)
            device.synchronize()
    except DeviceOutOfMemory as error:
        found = error
    require(found is not None, f"allocating {nbytes} bytes on a device of {nbytes // 4} raised no error")
    require(torch.ones(8, device=device.torch).cpu().tolist() == [1.0] * 8, "the device is unusable after that")
