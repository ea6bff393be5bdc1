"""Tests of copies of results to the host, which an NPU makes while the host goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from hal.backends.npu import emulator

import hal
from hal.errors import DeviceError

Opened = Callable[..., hal.Backend]


def test_a_copy_arrives_behind_the_work_that_computes_it(npu: Opened) -> None:
    backend = npu()
    values = torch.arange(4.0).half().npu()
    with emulator.faults.delay("Add", 0.3):
        copy = hal.HostCopy(backend, values + values)
        values.zero_()  # later in the stream
        assert not copy.arrived
    found: list[list[float]] = []
    reader = threading.Thread(target=lambda: found.append(copy.wait()[0].tolist()))
    reader.start()
    reader.join()
    assert copy.arrived
    assert found == [[0, 2, 4, 6]]


def test_a_failure_before_the_copy_is_raised_where_the_host_waits(npu: Opened) -> None:
    backend = npu()
    values = torch.arange(4.0).half().npu()
    with emulator.faults.execution("Add"):
        copy = hal.HostCopy(backend, values + values)
        with pytest.raises(DeviceError, match="507015"):
            copy.wait()
