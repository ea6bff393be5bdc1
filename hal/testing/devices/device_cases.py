"""Cases of devices: opening, probing, copying tensors."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import torch

from hal.ops.declaration.samples import Draw
from hal.testing.case import Case, require
from hal.testing.operations.compared_call import same_bits
from hal.testing.target import Target, dtype_name

PROBE_SECONDS = 0.05
"""Time limit of a probe; the fastest of five calls counts, because the machine may be busy."""
KINDS = (torch.int8, torch.int32, torch.int64, torch.bool, torch.float32)
"""Dtypes that every model copies, in addition to the backend's."""


def cases(target: Target) -> Iterator[Case]:
    """Yield ``devices/...``."""
    if target.driver is not None:
        yield Case("devices/probe", partial(_probe, target))
    yield Case("devices/name", partial(_name, target))
    yield Case("devices/opened-twice", partial(_opened_twice, target))
    yield Case("devices/constant", partial(_constant, target))
    for dtype in dict.fromkeys((*target.backend.limits.dtypes, *KINDS)):
        yield Case(f"devices/copies/{dtype_name(dtype)}", partial(_copies, target, dtype))
    yield Case("devices/empty", partial(_empty, target))


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
