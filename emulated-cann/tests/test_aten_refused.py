"""Tests that calls the hardware would refuse are refused before they run, with a reason. Device errors come later."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch
from helpers.thorough import PROCESSES, thorough
from support.children import ends_well
from torch import Tensor
from torch.nn import functional

NAMED = {
    "float64 product": (
        lambda: double(3, 3) @ double(3, 3),
        "aclnnMatmul.*self must be one of Float, Half, BFloat16, but is Double",
    ),
    "int8 product": (
        lambda: torch.mm(ones(3, 3).char(), ones(3, 3).char()),
        "aclnnMm.*self must be one of .*, but is Char",
    ),
    "float index": (
        lambda: ones(3, 3).index_select(0, ones(2)),
        "aclnnIndexSelect.*index must be one of Long, Int, but is Float",
    ),
    "float64 activation": (lambda: functional.silu(double(3)), "aclnnSilu.*self must be one of .*, but is Double"),
    "integer softmax": (lambda: torch.softmax(ones(3).int(), 0), "aclnnSoftmax.*self must be one of .*, but is Int"),
    "nine dimensions": (lambda: ones(*[1] * 9), "aclnnInplaceOne.*must have at most 8 dimensions, but has 9"),
    "top beyond the end": (lambda: ones(3).topk(4), "aclnnTopkV2.*the size of the dimension, 3, but is 4"),
    "scatter beyond src": (
        lambda: ones(4, 4).scatter_(1, ones(4, 3).long(), ones(4, 2)),
        r"aclnnInplaceScatter.*at most as large as src .*\[4, 3\] and \[4, 2\]",
    ),
}


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape, device="npu")


def double(*shape: int) -> Tensor:
    """Return a float64 tensor on the NPU.

    torch_npu converts copies to float32, but not tensors created on the device.
    """
    return torch.empty(*shape, device="npu", dtype=torch.float64)


@pytest.fixture(autouse=True)
def healthy_afterwards() -> Iterator[None]:
    yield
    assert (ones(2) + 1).tolist() == [2, 2]
    torch.npu.synchronize()


@pytest.mark.parametrize("name", NAMED)
def test_refused(name: str) -> None:
    call, reason = NAMED[name]
    with pytest.raises(RuntimeError, match=r"(?s)161002.*" + reason):
        call()


def test_a_refused_call_writes_nothing() -> None:
    out = torch.full((3, 3), 5, device="npu", dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"(?s)161002.*self must be one of .*, but is Int"):
        torch.mm(ones(3, 3).int(), ones(3, 3).int(), out=out)
    assert (out == 5).all().item()


def test_the_reason_outlives_what_is_cleaned_up_after_it() -> None:
    """torch_npu destroys the handles of a refused call, even null handles, before it queries the error."""
    acl, aclnn = ctypes.CDLL("libascendcl.so"), ctypes.CDLL("libopapi.so")
    acl.aclGetRecentErrMsg.restype = ctypes.c_char_p
    assert aclnn.aclGetDataType(None, None) == 161001
    for kind in ("Tensor", "Scalar", "IntArray", "FloatArray", "BoolArray", "TensorList", "ScalarList"):
        assert getattr(aclnn, f"aclDestroy{kind}")(None) == 0
    assert b"aclGetDataType: an argument is null" in acl.aclGetRecentErrMsg()
    assert acl.aclGetRecentErrMsg() is None


def test_index_out_of_range() -> None:
    """Only the device reads an index, so the error comes when the host waits, and names the kernel."""
    far = torch.tensor([7], device="npu")
    result = ones(3, 4).index_select(0, far)
    with pytest.raises(RuntimeError, match="507015"):
        torch.npu.synchronize()
    assert result.shape == (1, 4)


BEGIN = """
import torch, torch_npu
from emulated_cann import control
torch.npu.config.allow_internal_format = True
x = torch.ones(4, 8).npu()
def failure(body):
    try:
        body()
        torch.npu.synchronize()
    except RuntimeError as error:
        return str(error)
"""


@thorough(PROCESSES)
def test_the_single_operator_interface_is_refused_by_name_and_the_process_goes_on() -> None:
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
    ends_well("-c", f"{BEGIN}{script}print('well')", TASK_QUEUE_ENABLE="0")


@thorough(PROCESSES)
def test_in_torch_npus_queue_the_single_operator_interface_stops_the_queue() -> None:
    """The exception is the same, but torch_npu's launch thread stops, as on hardware."""
    script = """
error = failure(lambda: torch_npu.npu_silu(x))
assert "100024" in error and "torch_npu runs Swish" in error, error
x + 1
error = failure(torch.npu.synchronize)
assert "task queue stopped" in error and "torch_npu runs Swish" in error, error
"""
    ends_well("-c", f"{BEGIN}{script}print('well')", TASK_QUEUE_ENABLE="1")
