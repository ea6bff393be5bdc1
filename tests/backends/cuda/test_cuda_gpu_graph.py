"""Tests for CUDA graphs on a GPU: host values are up to date, capture errors are explained, and memory is shared."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers import attending
from helpers.attending import LENGTHS
from torch import Tensor

import hal
from hal.errors import CaptureError, ConfigError

Opened = Callable[..., hal.Backend]


class Attend(attending.Attend):
    """Attention with block sizes and heads that every library supports."""

    def __init__(self, backend: hal.Backend, **given: Any) -> None:
        super().__init__(backend, block_size=64, head_dim=64, **given)

    def eagerly(self, lens: Sequence[int]) -> Tensor:
        host = torch.tensor(lens, dtype=torch.int32)
        self.device_lens.copy_(host)
        with torch.inference_mode():
            return self.twice(host).cpu()


TOLERANCE = 1e-2
"""Two kernels, one for graphs and one for eager calls, differ by up to 3e-3 after two attentions in float16, where the
one rounds weights before the product with values. Lengths that are not a replay's own differ by far more."""


def assert_same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.fixture(params=[None, "flashinfer", "triton", "torch"], ids=str)
def attend(request: pytest.FixtureRequest, gpu: Opened) -> Attend:
    try:
        return Attend(gpu(options={} if request.param is None else {"kernels": {"paged_attention": request.param}}))
    except ConfigError as error:
        pytest.skip(error.problem)


class TestHostValues:
    def test_every_replay_reads_its_own_lengths(self, attend: Attend) -> None:
        """Also if the caller does not update the tensor of lengths on the device."""
        expected = [attend.eagerly(lens) for lens in LENGTHS]
        graph = attend.backend.graph()
        output = graph.capture(attend.twice)
        address = output.data_ptr()
        for lens, want in zip(LENGTHS, expected, strict=True):
            attend.device_lens.fill_(1)
            graph.replay(**attend.host_values(lens))
            assert_same(output.cpu(), want)
        assert graph.outputs.data_ptr() == address

    def test_without_a_wait_between_replays(self, attend: Attend) -> None:
        """A replay whose lengths are set while the previous one runs must not change the previous one's lengths."""
        expected = [attend.eagerly(lens) for lens in LENGTHS]
        graph, results = attend.backend.graph(), []
        output = graph.capture(attend.twice)
        torch.cuda._sleep(50_000_000)
        for lens in LENGTHS * 20:
            graph.replay(**attend.host_values(lens))
            results.append(output.clone())
        for found, want in zip(results, expected * 20, strict=True):
            assert_same(found.cpu(), want)


class TestCapture:
    @pytest.mark.parametrize(
        ("breaks", "message"),
        [
            (lambda x: x.sum().item(), "it synchronizes|not pinned"),
            (lambda x: x.cpu(), "it synchronizes|not pinned"),
            (lambda x: torch.ones(8).to(x.device), "not pinned|it synchronizes"),
            (lambda x: torch.cuda.synchronize(), "it synchronizes"),
            (lambda x: unjoined(x), "a stream that was not joined"),
        ],
        ids=["item", "cpu", "unpinned", "synchronize", "unjoined"],
    )
    def test_what_cannot_be_captured_is_said_and_the_process_goes_on(
        self, gpu: Opened, breaks: Callable[[Tensor], Any], message: str
    ) -> None:
        backend = gpu()
        x, stream = torch.ones(8, device=backend.device.torch), torch.cuda.current_stream()
        graph = backend.graph()

        def function() -> Tensor:
            y = x + 1
            breaks(y)
            return y * 2

        with pytest.raises(CaptureError, match=message) as caught:
            graph.capture(function)
        assert caught.value.remedy
        assert caught.value.__cause__ is not None
        assert torch.cuda.current_stream() == stream
        assert not torch.cuda.is_current_stream_capturing()
        backend.device.empty_cache()  # Fails if the allocator is still in capture mode.
        output = graph.capture(lambda: x + 2)
        graph.replay()
        assert output.tolist() == [3.0] * 8

    def test_another_thread_may_work_meanwhile(self, gpu: Opened) -> None:
        backend = gpu()
        x, made = torch.ones(8, device=backend.device.torch), []

        def elsewhere() -> None:
            made.append(torch.zeros(1 << 22, device=backend.device.torch).sum().item())

        def function() -> Tensor:
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            return x + 1

        output = backend.graph().capture(function)
        assert set(made) == {0.0}
        assert output.shape == (8,)


def unjoined(x: Tensor) -> None:
    """Launch work on another stream, which the captured stream never waits for."""
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        x + 1


class TestMemory:
    def test_memory_of_cublas_is_the_pools(self, gpu: Opened) -> None:
        """cuBLAS's workspace is released, as Inductor does when it captures, and other graphs reuse it."""
        backend = gpu()
        weight = torch.randn(1024, 16384, device=backend.device.torch, dtype=torch.float16) / 128
        x = torch.randn(1, 16384, device=backend.device.torch, dtype=torch.float16)  # long sums, which cuBLAS splits
        expected = x @ weight.t()
        graph = backend.graph()
        output = graph.capture(lambda: x @ weight.t())
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        with torch.cuda.stream(backend.capture_stream):  # type: ignore[attr-defined]
            others = [torch.zeros(1 << 20, device=backend.device.torch) for _ in range(64)]
        torch.cuda.synchronize()
        for _ in range(3):
            graph.replay()
        assert_same(output.cpu(), expected.cpu())
        assert not any(each.any().item() for each in others)

    def test_many_sizes_take_little_more_than_the_largest(self, gpu: Opened) -> None:
        backend = gpu()
        weight = torch.randn(2048, 2048, device=backend.device.torch, dtype=torch.float16)
        x = torch.randn(4096, 2048, device=backend.device.torch, dtype=torch.float16)

        def step(rows: int) -> Tensor:
            hidden = x[:rows]
            for _ in range(4):
                hidden = torch.nn.functional.silu(hidden @ weight)
            return hidden

        def reserved() -> int:
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            return torch.cuda.memory_reserved()

        step(16)  # cuBLAS's one-time allocation
        graphs, pool, before, after = [], None, reserved(), []
        for rows in (4096, 2048, 1024, 512, 256, 128):
            graph = backend.graph()
            graph.capture(lambda rows=rows: step(rows), pool=pool)
            pool = graph.pool
            graphs.append(graph)
            after.append(reserved() - before)
        assert after[-1] <= 1.15 * after[0], after
        for graph in graphs:
            graph.reset()
        del graph
        assert reserved() <= before


def test_on_another_gpu_than_the_current_one(gpu: Opened) -> None:
    gpu()
    if torch.cuda.device_count() < 2:
        pytest.skip("there is only one GPU")
    attend = Attend(gpu(options={"device_index": 1}))
    expected = [attend.eagerly(lens) for lens in LENGTHS]
    graph = attend.backend.graph()
    output = graph.capture(attend.twice)
    with torch.cuda.device(0):
        for lens, want in zip(LENGTHS, expected, strict=True):
            graph.replay(**attend.host_values(lens))
            assert_same(output.cpu(), want)


def test_a_device_that_is_not_there(gpu: Opened) -> None:
    with pytest.raises(ConfigError, match="the option device_index is 99, and the process sees"):
        gpu(options={"device_index": 99})


BROKEN = """
import torch, hal
backend = hal.open("cuda")
table = torch.zeros(4, 8, device=backend.device.torch)
try:
    with backend.translating_errors():
        hal.ops.embedding(torch.tensor([9], device=backend.device.torch), table).cpu()
except hal.errors.DeviceError as error:
    print(error.problem.partition(":")[0], "|", error.remedy)
"""


def test_a_value_out_of_range_is_an_error_that_says_so(gpu: Opened) -> None:
    """Runs in a subprocess, because CUDA is unusable in the process after a device-side error."""
    gpu()
    result = subprocess.run([sys.executable, "-c", BROKEN], capture_output=True, text=True, check=False)
    assert "a kernel found a value out of range" in result.stdout, result.stderr
    assert "restart the process" in result.stdout
