"""Tests for torch's kernels: device memory, stream order, and errors that are reported later."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch
from emulated_cuda.calls import in_a_process


def test_a_graph_reads_memory_anew_and_a_pool_is_reused() -> None:
    x, graph = torch.zeros(5, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = (x * 2 + 1).softmax(0).cumsum(0)
    for seed in range(3):
        values = torch.randn(5, generator=torch.Generator().manual_seed(seed))
        x.copy_(values)
        graph.replay()
        torch.testing.assert_close(y.cpu(), (values * 2 + 1).softmax(0).cumsum(0))


def test_results_have_the_shapes_of_out_and_of_lists() -> None:
    x = torch.arange(12.0, device="cuda").view(3, 4)
    out = torch.empty(0, device="cuda")
    torch.mm(x, x.t(), out=out)
    assert out.tolist() == (x.cpu() @ x.cpu().t()).tolist()
    values, indices = x.max(dim=1)
    assert (values.tolist(), indices.tolist()) == ([3.0, 7.0, 11.0], [3, 3, 3])
    assert [each.tolist() for each in torch.unbind(torch._foreach_add([x, x], 1)[1])] == (x.cpu() + 1).tolist()
    assert x[x > 8].tolist() == [9.0, 10.0, 11.0]


def test_what_depends_on_values_waits_for_the_device() -> None:
    x = torch.ones(3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
            x.nonzero()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with pytest.raises(RuntimeError), torch.cuda.graph(graph):  # noqa: PT012
        with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
            x.nonzero()
        x.add_(1)


def test_draws_follow_the_devices_generator() -> None:
    def drawn() -> list[float]:
        return [*torch.rand(2, device="cuda").tolist(), *torch.randn(2, device="cuda").tolist()]

    torch.cuda.manual_seed(5)
    first, second = drawn(), drawn()
    torch.cuda.manual_seed(5)
    assert [drawn(), drawn()] == [first, second]
    assert first != second


def test_wrong_arguments_raise_at_the_call() -> None:
    x = torch.ones(2, 3, device="cuda")
    with pytest.raises(RuntimeError, match=r"cannot be multiplied|same reduction dim"):
        x @ x
    assert (x @ x.t()).tolist() == [[3.0, 3.0]] * 2


def test_an_index_out_of_range_is_a_device_side_assert_and_stays() -> None:
    ran = in_a_process("""
import torch
table, last = torch.zeros(4, 8, device="cuda"), torch.tensor([3], device="cuda")
torch.nn.functional.embedding(last, table).cpu()
for index in (last + 6, last):
    try:
        torch.nn.functional.embedding(index, table).cpu()
    except torch.AcceleratorError as error:
        print(str(error).partition("\\n")[0])
print(cuda.call("cudaDeviceSynchronize"), cuda.call("cudaDeviceSynchronize"), sep="|")
""")
    asserted = "device-side assert triggered"
    assert ran.stdout.splitlines() == [f"CUDA error: {asserted}"] * 2 + [f"{asserted}|{asserted}"], ran.stderr
    assert "index out of range in self" in ran.stderr


def test_a_kernel_in_python_that_fails() -> None:
    ran = in_a_process("""
import torch
from emulated_cuda.kernels.stream import launch
torch.zeros(1, device="cuda")
launch("fails", lambda: 1 / 0)
print(cuda.call("cudaDeviceSynchronize"))
""")
    assert ran.stdout == "unspecified launch failure\n", ran.stderr
    assert "ZeroDivisionError" in ran.stderr


def test_tensors_end_where_memory_cannot_be_touched() -> None:
    """Out-of-bounds accesses are detected if torch does not split larger allocations."""
    code = "import ctypes, torch; x = torch.zeros(128, device='cuda'); ctypes.string_at(x.data_ptr() + 512, 1)"
    environ = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    ran = subprocess.run([sys.executable, "-c", code], env=environ, check=False)
    assert ran.returncode == -signal.SIGSEGV
