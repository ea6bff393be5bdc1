"""Measurement of a device: copy rates, launch time and memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from hal.doctor.findings import Measures
from hal.drivers.backend import Backend

COPY_BYTES = 64 << 20
COPIES = 7
LAUNCHES = 200
WARM = 20
IN_FLIGHT = 50
"""Launches between two synchronizations; with a full queue, the measurement would include waiting."""


def measures(backend: Backend) -> Measures:
    """Measure the device of ``backend``; times are medians of several repeats."""
    memory = backend.device.memory_stats()
    size = max(1, min(COPY_BYTES, memory.free // 8))
    host, pinned = _host_memory(size, backend.device.torch)
    there = torch.empty(size, dtype=torch.uint8, device=backend.device.torch)
    to_device = _seconds(backend, lambda: there.copy_(host))
    to_host = _seconds(backend, lambda: host.copy_(there))
    return Measures(
        host_to_device_gb_per_s=_figure(size / to_device / 1e9),
        device_to_host_gb_per_s=_figure(size / to_host / 1e9),
        copy_bytes=size,
        pinned=pinned,
        launch_us=_figure(_launch(backend) * 1e6),
        memory_free_bytes=memory.free,
        memory_total_bytes=memory.total,
    )


def _host_memory(size: int, device: torch.device) -> tuple[Tensor, bool]:
    """Return host memory to copy from, and whether it is page-locked."""
    if device.type != "cpu":
        try:
            return torch.zeros(size, dtype=torch.uint8, pin_memory=True), True
        except (RuntimeError, NotImplementedError):
            pass  # the runtime does not support pinned memory
    return torch.zeros(size, dtype=torch.uint8), False


def _seconds(backend: Backend, copy: Callable[[], object]) -> float:
    copy()
    taken = []
    for _ in range(COPIES):
        backend.device.synchronize()
        start = time.perf_counter()
        copy()
        backend.device.synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _launch(backend: Backend) -> float:
    number = torch.zeros(1, device=backend.device.torch)
    taken = []
    for index in range(-WARM, LAUNCHES):
        if index % IN_FLIGHT == 0:
            backend.device.synchronize()
        start = time.perf_counter()
        number.add_(1)
        if index >= 0:
            taken.append(time.perf_counter() - start)
    backend.device.synchronize()
    return statistics.median(taken)


def _figure(value: float) -> float:
    return float(f"{value:.3g}")
