"""Cases of streams and events: waits order work, and results are correct after synchronization."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from hal.device.device import Device, Event, Stream
from hal.testing.case import Case, require
from hal.testing.target import Target

ROUNDS = 10
"""Repetitions of a check in which a missing wait would fail only sometimes."""
WORK = 24
"""Operations before the work that others wait for, so that a missing wait is detected."""


def cases(target: Target) -> Iterator[Case]:
    """Yield ``streams/...`` and ``events/...``."""
    for name, check in (
        ("streams/order", _order),
        ("streams/wait-stream", _wait_stream),
        ("streams/restored", _restored),
        ("streams/restored-after-an-error", _restored_after_an_error),
        ("streams/query", _query),
        ("streams/synchronize", _synchronize),
        ("streams/priority", _priority),
        ("events/wait", _event_wait),
        ("events/record-again", _record_again),
        ("events/before-record", _before_record),
        ("events/synchronize", _event_synchronize),
        ("events/timing", _timing),
        ("events/across", _across),
    ):
        yield Case(name, partial(check, target))


def _work(x: Tensor, number: int) -> Tensor:
    """Return ``x + number`` after a delay."""
    for _ in range(WORK):
        x = x * 1
    return x + number


def _recorded(target: Target, event: Event, number: int) -> Tensor:
    """Return :func:`_work` of zeros on a new stream, and record the event behind it."""
    stream, base = target.device.stream(), torch.zeros(64, 64, device=target.device.torch)
    target.device.synchronize()
    with stream:
        made = _work(base, number)
    event.record(stream)
    return made


def _chain(device: Device, waits: str) -> None:
    """Let one stream overwrite a buffer, and another read each value after the wait under test."""
    first, second = device.stream(), device.stream()
    buffer = torch.full((64, 64), -1.0, device=device.torch)
    start = torch.zeros(64, 64, device=device.torch)
    kept: list[Tensor] = []  # keeps the memory from being reused by another stream
    device.synchronize()
    for number in range(ROUNDS):
        with first:
            made = _work(start, number)
            buffer.copy_(made)
        if waits == "stream":
            second.wait_stream(first)
        else:
            event = device.event()
            event.record(first)
            event.wait(second)
        with second:
            kept += [made, buffer.clone()]
        if waits == "stream":
            first.wait_stream(second)
        else:
            event.record(second)
            event.wait(first)
    device.synchronize()
    found = [sorted(set(each.flatten().tolist())) for each in kept[1::2]]
    wrong = [(number, values) for number, values in enumerate(found) if values != [float(number)]]
    require(not wrong, f"a stream that waited for another read {wrong[:1]} (round, values): the wait had no effect")


def _order(target: Target) -> None:
    device = target.device
    stream = device.stream()
    x = torch.zeros(64, 64, device=device.torch)
    device.synchronize()
    with stream:
        for number in range(50):
            x.mul_(0.5).add_(number)
    stream.synchronize()
    expected = 0.0
    for number in range(50):
        expected = expected * 0.5 + number
    require(torch.allclose(x.cpu(), torch.full((64, 64), expected)), "work on one stream did not run in order")


def _wait_stream(target: Target) -> None:
    _chain(target.device, "stream")


def _event_wait(target: Target) -> None:
    _chain(target.device, "event")


def current_stream(device: Device) -> int | None:
    """Return the id of the current stream, or None on the CPU."""
    if device.torch.type == "cpu":
        return None
    return int(torch.accelerator.current_stream(device.torch).stream_id)


def _restored(target: Target) -> None:
    device = target.device
    before = current_stream(device)
    outer, inner = device.stream(), device.stream()
    with outer as entered:
        require(entered is outer, "entering a stream returns another object")
        within = current_stream(device)
        with inner:
            pass
        require(current_stream(device) == within, "leaving an inner stream did not restore the outer one")
    require(current_stream(device) == before, "leaving a stream did not restore the one before")


def _restored_after_an_error(target: Target) -> None:
    device = target.device
    before, passed_on = current_stream(device), False
    try:
        with device.stream():
            raise KeyError("raised inside")
    except KeyError:
        passed_on = True
    require(passed_on, "a stream swallowed the exception raised in its block")
    require(current_stream(device) == before, "the previous stream was not restored after an exception")


def _query(target: Target) -> None:
    device = target.device
    stream = device.stream()
    require(stream.query() is True, "query() of a new stream is False")
    with stream:
        x = _work(torch.zeros(64, 64, device=device.torch), 1)
    stream.synchronize()
    require(stream.query() is True, "query() of a stream is False after synchronize()")
    require(float(x.cpu()[0, 0]) == 1.0, "synchronize() returned before the work was done")


def _synchronize(target: Target) -> None:
    device = target.device
    streams: list[Stream] = [device.stream() for _ in range(3)]
    made = []
    base = torch.zeros(64, 64, device=device.torch)
    device.synchronize()
    for number, stream in enumerate(streams):
        with stream:
            made.append(_work(base, number))
    device.synchronize()
    require(all(stream.query() for stream in streams), "Device.synchronize() left work on a stream")
    require([float(each.cpu()[0, 0]) for each in made] == [0.0, 1.0, 2.0], "work on three streams gave wrong values")


def _priority(target: Target) -> None:
    device = target.device
    for priority in (0, -1):
        with device.stream(priority=priority) as stream:
            x = torch.ones(8, device=device.torch) + 1
        stream.synchronize()
        require(x.cpu().tolist() == [2.0] * 8, f"work on a stream of priority {priority} gave wrong values")


def _record_again(target: Target) -> None:
    """Check that recording an event again moves it to the new point."""
    device = target.device
    event, writer, reader = device.event(), device.stream(), device.stream()
    base = torch.zeros(64, 64, device=device.torch)
    device.synchronize()
    event.record(writer)
    with writer:
        x = _work(base, 5)
    event.record(writer)
    event.wait(reader)
    with reader:
        y = x + 1
    device.synchronize()
    require(float(y.cpu()[0, 0]) == 6.0, "a wait for an event recorded twice waited for the first point")


def _before_record(target: Target) -> None:
    event = target.device.event()
    require(event.query() is True, "query() of an event that was never recorded is False")
    event.synchronize()


def _event_synchronize(target: Target) -> None:
    event = target.device.event()
    x = _recorded(target, event, 3)
    event.synchronize()
    require(event.query() is True, "query() of an event is False after synchronize()")
    require(float(x.cpu()[0, 0]) == 3.0, "an event completed before the work recorded by it")


def _timing(target: Target) -> None:
    device = target.device
    stream = device.stream()
    begin, middle, end = (device.event(timing=True) for _ in range(3))
    begin.record(stream)
    with stream:
        x = torch.zeros(64, 64, device=device.torch)
        for _ in range(4):
            x = _work(x, 1)
    middle.record(stream)
    end.record(stream)
    end.synchronize()
    took = begin.elapsed_time(middle)
    require(took > 0.0, f"the time between two events with work between them is {took} ms")
    require(begin.elapsed_time(end) >= took, "a later event has an earlier time")


def _across(target: Target) -> None:
    """Check that several streams can wait for one event."""
    device, event = target.device, target.device.event()
    x = _recorded(target, event, 7)
    made, readers = [], [device.stream() for _ in range(3)]
    for reader in readers:
        event.wait(reader)
        with reader:
            made.append(x * 2)
    device.synchronize()
    require([float(each.cpu()[0, 0]) for each in made] == [14.0] * 3, "a stream did not wait for the event of another")
