"""Tests of pyACL, CANN's Python interface, on the emulated CANN: beside torch_npu, and alone in a process."""

from __future__ import annotations

import ctypes
import sys
import threading

import acl
import pytest
import torch
import torch_npu  # noqa: F401  # torch.npu
from support.children import ends_well

HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2


def test_copies_between_the_host_and_tensors() -> None:
    from acl.rt import memcpy

    tensor = torch.zeros(4, dtype=torch.int32, device="npu")
    torch.npu.synchronize()
    data = (ctypes.c_int32 * 4)(1, 2, 3, 4)
    assert memcpy(tensor.data_ptr(), 16, ctypes.addressof(data), 16, HOST_TO_DEVICE) == 0
    assert tensor.tolist() == [1, 2, 3, 4]
    buffer, code = acl.rt.malloc_host(16)
    assert code == 0
    stream = torch.npu.current_stream()
    assert acl.rt.memcpy_async(buffer, 16, tensor.data_ptr(), 16, DEVICE_TO_HOST, stream.npu_stream) == 0
    assert acl.rt.synchronize_stream(stream.npu_stream) == 0
    assert acl.util.ptr_to_bytes(buffer, 16) == bytes(data)
    assert acl.rt.free_host(buffer) == 0


def test_devices() -> None:
    torch.npu.set_device(0)
    assert acl.rt.get_device() == (0, 0)
    assert acl.rt.get_device_count() == (2, 0)
    assert acl.get_soc_name() == "Ascend910B3"
    free, total, code = acl.rt.get_mem_info(1)
    assert (free, total, code) == (*torch.npu.mem_get_info(0), 0)
    assert acl.rt.set_device(7) == 107001
    assert "device" in acl.get_recent_err_msg()


def test_callbacks_run_in_the_thread_that_subscribed() -> None:
    stream = torch.npu.Stream()
    called, ready, stop = list[object](), threading.Event(), threading.Event()

    def serve() -> None:
        acl.rt.set_device(0)
        ready.set()
        while not stop.is_set():
            acl.rt.process_report(50)

    thread = threading.Thread(target=serve)
    thread.start()
    ready.wait()
    assert acl.rt.subscribe_report(thread.ident, stream.npu_stream) == 0
    for block in (0, 1):
        code = acl.rt.launch_callback(
            lambda data: called.append((*data, threading.get_ident())), [block], block, stream.npu_stream
        )
        assert code == 0
    assert acl.rt.synchronize_stream(stream.npu_stream) == 0
    assert acl.rt.unsubscribe_report(thread.ident, stream.npu_stream) == 0
    stop.set()
    thread.join()
    assert called == [(0, thread.ident), (1, thread.ident)]


@pytest.mark.parametrize("name", ["mdl", "rt.launch_kernel", "util.vector_to_ptr"])
def test_other_functions_are_refused_by_name(name: str) -> None:
    *folders, last = f"acl.{name}".split(".")
    with pytest.raises(AttributeError, match=rf"the emulated CANN's pyACL has no acl\.{name}"):
        getattr(sys.modules[".".join(folders)], last)
    with pytest.raises(TypeError, match="aclrtSetDevice takes 1 arguments, and 0 were given"):
        acl.rt.set_device()


ALONE = """
import acl
assert acl.init() == 0 and acl.rt.set_device(1) == 0
address, code = acl.rt.malloc(8, 0)
assert code == 0 and acl.rt.memset(address, 8, 3, 8) == 0
start, code = acl.rt.create_event()
stream, code = acl.rt.create_stream()
assert acl.rt.record_event(start, stream) == 0 and acl.rt.synchronize_event(start) == 0
assert acl.rt.event_elapsed_time(start, start) == (0.0, 0)
assert acl.rt.destroy_event(start) == acl.rt.destroy_stream(stream) == acl.rt.free(address) == 0
assert acl.rt.reset_device(1) == 0 and acl.finalize() == 0
print("well")
"""


def test_a_program_without_torch() -> None:
    ends_well("-c", ALONE)
