"""Tests that operations through the single-operator interface (aclop), which is not emulated, are refused."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

from helpers.thorough import PROCESSES, thorough

ACL = ctypes.CDLL("libascendcl.so")
for creator in ("aclCreateTensorDesc", "aclCreateDataBuffer", "aclopCreateAttr", "aclGetDataBufferAddr"):
    getattr(ACL, creator).restype = ctypes.c_void_p
ACL.aclGetRecentErrMsg.restype = ctypes.c_char_p

BEGIN = """
import torch, torch_npu
from hal.backends.npu.emulator import control
torch.npu.config.allow_internal_format = True
x = torch.ones(4, 8).npu()
def failure(body):
    try:
        body()
        torch.npu.synchronize()
    except RuntimeError as error:
        return str(error)
"""


def run(script: str, task_queue: str) -> None:
    environ = {**os.environ, "TASK_QUEUE_ENABLE": task_queue}
    command = [sys.executable, "-c", f"{BEGIN}{script}print('well')"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "well\n", done.stderr


@thorough(PROCESSES)
def test_it_is_refused_by_name_and_the_process_goes_on() -> None:
    script = """
before = control.live_handles()
error = failure(lambda: torch_npu.npu_silu(x))
assert "100024" in error and "torch_npu runs Swish through the single-operator interface" in error, error
assert "torch's function instead of an npu_* one" in error, error
assert (x + 1).cpu().eq(2).all()
weight = torch_npu.npu_format_cast(torch.ones(64, 64).npu(), 29)
error = failure(lambda: torch.ones(16, 64).npu() @ weight)
assert "MatMul" in error and "input 1 is in format 29; cast it to ND" in error, error
assert (torch.ones(16, 64).npu() @ torch_npu.npu_format_cast(weight, 2)).cpu().eq(64).all()
"""
    run(script, task_queue="0")


@thorough(PROCESSES)
def test_in_torch_npus_queue_it_stops_the_queue() -> None:
    """The exception is the same, but torch_npu's launch thread stops, as on hardware."""
    script = """
error = failure(lambda: torch_npu.npu_silu(x))
assert "100024" in error and "torch_npu runs Swish" in error, error
x + 1
error = failure(torch.npu.synchronize)
assert "task queue stopped" in error and "torch_npu runs Swish" in error, error
"""
    run(script, task_queue="1")


def test_a_description_is_what_it_was_made_of() -> None:
    sizes = (ctypes.c_int64 * 3)(2, 3, 5)
    desc = ctypes.c_void_p(ACL.aclCreateTensorDesc(1, 3, sizes, 2))
    size = ctypes.c_int64()
    found = []
    for index in range(ACL.aclGetTensorDescNumDims(desc)):
        assert ACL.aclGetTensorDescDimV2(desc, ctypes.c_size_t(index), ctypes.byref(size)) == 0
        found.append(size.value)
    assert found == [2, 3, 5]
    assert ACL.aclGetTensorDescElementCount(desc) == 30
    assert (ACL.aclGetTensorDescType(desc), ACL.aclGetTensorDescFormat(desc)) == (1, 2)
    assert ACL.aclGetTensorDescDimV2(desc, ctypes.c_size_t(3), ctypes.byref(size)) == 100000
    assert b"less than the number of dimensions, 3, but is 3" in ACL.aclGetRecentErrMsg()
    assert ACL.aclSetTensorShape(desc, 1, sizes) == 0
    assert ACL.aclSetTensorFormat(desc, 29) == 0
    assert (ACL.aclGetTensorDescElementCount(desc), ACL.aclGetTensorDescFormat(desc)) == (2, 29)

    buffer = ctypes.c_void_p(ACL.aclCreateDataBuffer(ctypes.c_void_p(4096), ctypes.c_size_t(12)))
    assert (ACL.aclGetDataBufferAddr(buffer), ACL.aclGetDataBufferSizeV2(buffer)) == (4096, 12)
    attributes = ctypes.c_void_p(ACL.aclopCreateAttr())
    assert ACL.aclopSetAttrInt(attributes, b"axis", ctypes.c_int64(1)) == 0
    assert ACL.aclopSetAttrInt(None, b"axis", ctypes.c_int64(1)) == 100000
    ACL.aclopDestroyAttr(attributes)
    ACL.aclDestroyTensorDesc(desc)
    assert ACL.aclDestroyDataBuffer(buffer) == 0
