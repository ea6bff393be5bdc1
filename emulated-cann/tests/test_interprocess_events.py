"""Tests for events that two processes share."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from helpers.thorough import EXHAUSTIVE, PROCESSES, thorough
from support.children import ends_well, python

SCRIPTS = Path(__file__).parent / "scripts"


@thorough(PROCESSES)
@thorough(EXHAUSTIVE, r"\[1\]")
@pytest.mark.parametrize("task_queue", ["0", "1"])
def test_two_processes_wait_for_each_others_events(task_queue: str) -> None:
    ends_well(str(SCRIPTS / "interprocess_events.py"), TASK_QUEUE_ENABLE=task_queue)


class TestInterprocessEvents:
    def test_what_they_are_not_for(self) -> None:
        acl = ctypes.CDLL("libascendcl.so")
        stream, event, plain = torch.npu.Stream(), ctypes.c_void_p(), ctypes.c_void_p()
        handle = ctypes.c_void_p(stream.npu_stream)
        assert acl.aclrtCreateEventExWithFlag(ctypes.byref(event), 0x41) == 107000
        assert acl.aclrtCreateEventExWithFlag(ctypes.byref(event), 0x40) == 0
        assert acl.aclrtRecordEvent(event, handle) == 0
        assert acl.aclrtSynchronizeEvent(event) == 0
        result = (ctypes.c_char * 64)()
        assert acl.aclrtEventElapsedTime(result, event, event) == 207000
        assert acl.aclrtEventGetTimestamp(event, result) == 207000
        assert acl.aclrtQueryEventWaitStatus(event, result) == 207000
        assert acl.aclrtResetEvent(event, handle) == 207000
        assert acl.aclrtCreateEventExWithFlag(ctypes.byref(plain), 1) == 0
        assert acl.aclrtIpcGetEventHandle(plain, result) == 107000
        assert acl.aclmdlRICaptureBegin(handle, 0) == 0
        assert acl.aclrtRecordEvent(event, handle) == 207000
        assert acl.aclrtStreamWaitEvent(handle, event) == 207000
        assert acl.aclmdlRICaptureEnd(handle, ctypes.byref(ctypes.c_void_p())) == 0

    @thorough(PROCESSES)
    def test_a_handle_of_a_process_that_has_ended(self) -> None:
        program = "import torch, torch_npu, sys; e = torch.npu.Event(interprocess=True); e.record(); " + (
            "torch.npu.synchronize(); print(e.ipc_handle().hex())"
        )
        done = python("-c", program)
        with pytest.raises(RuntimeError, match="has no event for this handle"):
            torch.npu.Event.from_ipc_handle(torch.device("npu:0"), bytes.fromhex(done.stdout))
