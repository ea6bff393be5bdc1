"""Cases of devices: opening, probing, copying tensors, and their memory."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from functools import partial

import torch

from hal.errors import DeviceOutOfMemory
from hal.ops.declaration.constraints import Draw
from hal.testing.case import Case, NotApplicable, require
from hal.testing.compared_call import same_bits
from hal.testing.target import Target, dtype_name

PROBE_SECONDS = 0.05
"""Time limit of a probe; the fastest of five calls counts, because the machine may be busy."""
KINDS = (torch.int8, torch.int32, torch.int64, torch.bool, torch.float32)
"""Dtypes that every model copies, in addition to the backend's."""
BYTES = 64 << 20
"""Size of the test tensor, far above other allocations in the process."""


def cases(target: Target) -> Iterator[Case]:
    """Yield ``devices/...`` and ``memory/...``."""
    if target.driver is not None:
        yield Case("devices/probe", partial(_probe, target))
    yield Case("devices/name", partial(_name, target))
    yield Case("devices/opened-twice", partial(_opened_twice, target))
    yield Case("devices/constant", partial(_constant, target))
    for dtype in dict.fromkeys((*target.backend.limits.dtypes, *KINDS)):
        yield Case(f"devices/copies/{dtype_name(dtype)}", partial(_copies, target, dtype))
    yield Case("devices/empty", partial(_empty, target))
    yield from memory_cases(target)


def _probe(target: Target) -> None:
    driver = target.driver
    assert driver is not None
    times = []
    for _ in range(5):
        began = time.perf_counter()
        probe = driver.probe()
        times.append(time.perf_counter() - began)
    require(
        min(times) <= PROBE_SECONDS,
        f"the probe takes {min(times) * 1e3:.0f} ms; the limit is {PROBE_SECONDS * 1e3:.0f} ms",
    )
    require(probe.available or bool(probe.reason and probe.hint), "the probe is negative without a reason and a hint")


def _name(target: Target) -> None:
    backend = target.backend
    if target.driver is not None:
        require(
            backend.name == target.driver.name == target.name,
            f"the entry point is {target.name!r}, the driver's name {target.driver.name!r}, and its backend's "
            f"{backend.name!r}; give all three the same name, which selects the driver in configurations",
        )
    require(bool(backend.device.name.strip()), "the device has no name")
    where = torch.empty(1, device=backend.device.torch).device
    require(where == backend.device.torch, f"a tensor created on {backend.device.torch} is on {where}")


def _opened_twice(target: Target) -> None:
    first, second = target.open(), target.open()
    require(first is not second, "opening the driver twice returned the same backend")
    require(second.active and not first.active, "the backend opened last is not active")
    require(first.limits == second.limits, "a second backend has other limits")
    require(set(first.kernels) == set(second.kernels), "a second backend has other kernels")
    first.activate()
    require(first.active and not second.active, "activate() did not activate the first backend")


def _constant(target: Target) -> None:
    backend = target.activated()
    before = backend.limits, backend.capabilities, backend.compilers, backend.state_layout
    x = Draw(backend.limits.dtypes[0], backend.device.torch).normal(4, 64)
    backend.ops.rms_norm(x, x[0].clone(), 1e-6)
    backend.device.synchronize()
    require(
        before == (backend.limits, backend.capabilities, backend.compilers, backend.state_layout),
        "limits, capabilities, compilers or state layout changed when the backend was used",
    )


def _copies(target: Target, dtype: torch.dtype) -> None:
    device = target.device.torch
    values = (torch.arange(6 * 35).view(6, 35) % 117 - 50).to(dtype)
    there = values.to(device)
    require(same_bits(there, values), "a copy to the device and back changed values")
    require(same_bits(there.t()[3:17:2], values.t()[3:17:2]), "a strided view changed on its way from the device")
    require(same_bits(values.t()[::3].to(device), values.t()[::3]), "a strided view changed on its way to the device")
    there[2:4, 5:9] = values[:2, :4].to(device)
    changed = values.clone()
    changed[2:4, 5:9] = values[:2, :4]
    require(same_bits(there, changed), "a write to a slice did not change exactly that slice")


def _empty(target: Target) -> None:
    device = target.device.torch
    for shape in ((0,), (0, 5), (3, 0)):
        require(torch.empty(shape).to(device).cpu().shape == shape, f"a copy of a tensor {shape} has another shape")
    target.device.synchronize()


def memory_cases(target: Target) -> Iterator[Case]:
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
