"""Tests that calls the hardware would refuse are refused before they run, with a reason. Device errors come later."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch
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


def test_data_dependent_shapes() -> None:
    """Data-dependent shapes are read after the operation has run, also if many are in flight."""
    masks = [torch.arange(8, device="npu") < n for n in range(9)]
    assert [len(each.nonzero()) for each in masks] == list(range(9))


def test_captured_operation_reads_its_inputs_anew() -> None:
    x = torch.zeros(4, device="npu")
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        y = (x + 1).cumsum(0).where(x >= 0, x)
    for value in (1.0, -3.0, 2.0):
        x.fill_(value)
        graph.replay()
        expected = torch.full((4,), value)
        assert torch.equal(y.cpu(), (expected + 1).cumsum(0).where(expected >= 0, expected))
