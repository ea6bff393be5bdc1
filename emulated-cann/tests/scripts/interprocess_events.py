"""Two processes that wait for each other's work with events."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
import torch_npu  # noqa: F401

NPU = torch.device("npu:0")


def child(handle: bytes, sent: Any, received: Any) -> None:
    theirs = torch.npu.Event.from_ipc_handle(NPU, handle)
    sent.put(theirs.query())  # The event is recorded behind work that waits for this process.
    x = torch.zeros(4, device=NPU)
    torch.npu.current_stream().wait_event(theirs)
    x += 1
    done = torch.npu.Event()
    done.record()
    sent.put(done.query())
    assert received.get() == "go on"
    theirs.synchronize()
    sent.put(theirs.query())
    assert x.cpu().tolist() == [1] * 4
    mine = torch.npu.Event(interprocess=True)
    mine.record()
    sent.put(mine.ipc_handle())
    assert received.get() == "opened"


def main() -> None:
    context = multiprocessing.get_context("spawn")
    sent, received = context.Queue(), context.Queue()
    event, gate = torch.npu.Event(interprocess=True), torch.npu.ExternalEvent()
    stream = torch.npu.Stream()
    with torch.npu.stream(stream):
        gate.wait(stream)
        event.record(stream)
    process = context.Process(target=child, args=(event.ipc_handle(), sent, received))
    process.start()
    assert sent.get() is False
    assert sent.get() is False
    gate.record(torch.npu.current_stream())
    received.put("go on")
    assert sent.get() is True
    theirs = torch.npu.Event.from_ipc_handle(NPU, sent.get())
    received.put("opened")
    theirs.wait()
    torch.npu.synchronize()
    assert theirs.query()
    process.join()
    assert process.exitcode == 0
    gone = bytes(event.ipc_handle())
    del event
    torch.npu.synchronize()
    with contextlib.suppress(RuntimeError):
        torch.npu.Event.from_ipc_handle(NPU, gone[:8] + bytes(8) + gone[16:])
        raise AssertionError("the handle of no event was opened")
    print("well")  # noqa: T201


if __name__ == "__main__":
    main()
