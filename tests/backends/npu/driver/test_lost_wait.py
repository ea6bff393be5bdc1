"""Tests that conformance detects waits that do nothing, on the emulated NPU, whose streams run in any order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import emulated_cann
import pytest
from hal.backends.npu.device import NpuDevice
from hal.backends.npu.driver import NpuDriver
from helpers.thorough import DRAW, thorough

import hal
from hal.testing import Conformance


class DeafStream(hal.vendor.Stream):
    """A stream whose `wait_stream` does nothing."""

    def wait_stream(self, other: hal.vendor.Stream) -> None:
        pass


class DeafEvent(hal.vendor.Event):
    """An event whose `wait` does nothing."""

    def wait(self, stream: hal.vendor.Stream) -> None:
        pass


class DeafStreams(NpuDevice):
    def stream(self, *, priority: int = 0) -> hal.vendor.Stream:
        return DeafStream(self.torch, priority=priority)


class DeafEvents(NpuDevice):
    def event(self, *, timing: bool = False) -> hal.vendor.Event:
        return DeafEvent(self.torch, timing=timing)


def opened(device: type[NpuDevice]) -> hal.Backend:
    backend = NpuDriver().open({"emulator": "on"})
    backend.device = device(backend.device.torch, backend.device.name)
    return backend


def conformance(device: type[NpuDevice]) -> Conformance:
    return Conformance(backend="npu", open=partial(opened, device))


@pytest.fixture(scope="module", params=[DeafStreams, DeafEvents], ids=["wait_stream", "Event.wait"])
def deaf(request: pytest.FixtureRequest) -> Conformance:
    return conformance(request.param)


@pytest.fixture(scope="module")
def twin() -> Conformance:
    return conformance(NpuDevice)


@thorough(DRAW, r"seed=[2-9]\]")
@pytest.mark.parametrize("seed", range(10), ids="seed={}".format)
def test_it_is_caught_in_any_order(deaf: Conformance, twin: Conformance, seed: int) -> None:
    streams = isinstance(deaf.target.device, DeafStreams)
    lost: dict[bool, Callable[[], None]] = {
        True: deaf.case("streams/wait-stream").run,
        False: deaf.case("events/wait").run,
    }
    with emulated_cann.schedule(seed):
        twin.case("streams/wait-stream").run()
        twin.case("events/wait").run()
        lost[not streams]()  # the other wait works
        with pytest.raises(AssertionError, match="the wait had no effect"):
            lost[streams]()


@thorough(DRAW, r"seed=[2-9]\]")
@pytest.mark.parametrize("seed", range(10), ids="seed={}".format)
def test_an_event_that_holds_back_none_of_several(twin: Conformance, seed: int) -> None:
    with emulated_cann.schedule(seed):
        twin.case("events/across").run()
        twin.case("events/record-again").run()
