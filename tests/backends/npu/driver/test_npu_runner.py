"""Tests for runners on the NPU: stream budgets, memory, stable addresses, and recovery from typed errors."""

from __future__ import annotations

import gc
import logging
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import emulated_cann
import pytest
import torch
import torch_npu
from helpers.pieces import eagerly
from helpers.thorough import AGAIN, EXHAUSTIVE, MODE, thorough
from torch import Tensor

import hal
from hal.errors import CaptureError, CompileError, DeviceError, DeviceOutOfMemory, GraphError
from hal.nn import Attention, CausalLM, Embedding, Linear
from hal.nn.model import LayerState
from hal.step import Batch

Opened = Callable[..., hal.Backend]
SIZES = [1, 2, 4]
ATTENTION = "FusedInferAttentionScoreV3"


class Toy(CausalLM):
    """A model with one attention. It reads a value on the host if the batch is larger than ``reads_above``."""

    vocab_size, max_length = 13, 512

    def __init__(self, *, reads_above: int | None = None, vocab_size: int = 13) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.embedding, self.qkv = Embedding(vocab_size, 32), Linear(32, 6 * 16)
        self.attention, self.out = Attention(2, 16), Linear(32, 32)
        self.states = [self.attention.states]
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator).half().npu()
        self.reads_above = reads_above

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Toy:
        return cls()

    def forward(self, batch: Batch, states: Sequence[LayerState]) -> Tensor:
        hidden = self.embedding(batch.token_ids)
        query, key, value = self.qkv(hidden).view(-1, 6, 16).split([2, 2, 2], dim=1)
        hidden = hidden + self.out(self.attention(query, key, value, batch, states[0]))
        if self.reads_above is not None and batch.num_sequences > self.reads_above:
            hidden = hidden * float(hidden.abs().max())
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self.embedding.as_linear(hidden)


@pytest.fixture
def opened(npu: Opened) -> Opened:
    def graphs(options: Mapping[str, Any] | None = None, **compilation: Any) -> hal.Backend:
        chosen = {"compiler": "graph", "capture_sizes": SIZES, **compilation}
        return npu(cache={"num_tokens": 2048}, compilation=chosen, options=dict(options or {}))

    return graphs


def prefilled(runner: hal.Runner, lengths: Sequence[int] = (150, 3, 20, 128)) -> list[list[int]]:
    """Fill the cache with a sequence of each length; return their blocks."""
    blocks = [[1 + 4 * row + block for block in range(4)] for row in range(len(lengths))]
    prompts = [[(7 * row + token) % 13 for token in range(length)] for row, length in enumerate(lengths)]
    runner.step(runner.batch(prompts, blocks))
    return blocks


def step(runner: hal.Runner, blocks: list[list[int]], rows: int = 4, shift: int = 0) -> Batch:
    lengths = [150 + shift, 3 + shift, 20 + shift, 128 + shift]
    return runner.batch([[row] for row in range(rows)], blocks[:rows], cached=lengths[:rows])


def check(runner: hal.Runner) -> None:
    """Check that the runner works and gives the result of an eager step."""
    blocks = prefilled(runner)
    for rows in (4, 1, 3, 2):
        batch = step(runner, blocks, rows)
        with runner.backend.translating_errors():
            found = runner.step(batch).logits.cpu()
        torch.testing.assert_close(found, eagerly(runner, batch).cpu(), rtol=2e-2, atol=2e-2)


def settle() -> None:
    gc.collect()
    torch.npu.synchronize()
    torch.npu.empty_cache()


def cached() -> list[Tensor]:
    """Allocate the free blocks that torch's allocator caches, so that the next allocation needs device memory."""
    settle()
    blocks = [block for segment in torch.npu.memory_snapshot() for block in segment["blocks"]]
    free = [block["size"] for block in blocks if block["state"] == "inactive" and block["size"] >= 1 << 20]
    # torch_npu adds some bytes to each request.
    return [torch.empty(size - 1024, dtype=torch.uint8, device="npu") for size in sorted(free, reverse=True)]


class TestBudget:
    def test_it_is_said_before_the_captures(self, opened: Opened, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "hal.execution")
        hal.Runner(Toy(), opened())
        said = [record.getMessage() for record in caplog.records if record.name == "hal.execution"]
        said = [message for message in said if not message.startswith("optimized")]
        assert said[0].startswith("capturing decode steps of 4, 2, 1 sequences: 3 of 1920 streams, about 0.")
        assert said[1] == "captured decode for whole steps: 1 sequence, 2 sequences, 4 sequences"

    def test_streams(self, opened: Opened) -> None:
        message = r"3 sizes need 3 streams, and 2 are left for graphs\n.*compilation.max_capture_size.*capture_sizes"
        with pytest.raises(CaptureError, match=message):
            hal.Runner(Toy(), opened({"max_streams": 2}))
        backend = opened({"max_streams": 5})
        first = hal.Runner(Toy(), backend)
        with pytest.raises(CaptureError, match="3 streams, and 2 are left"):  # the first runner's streams
            hal.Runner(Toy(), backend)
        check(first)
        del first
        check(hal.Runner(Toy(), backend))

    def test_memory(self, opened: Opened) -> None:
        backend, model = opened(), Toy()
        model.out = Wasteful(model.out)
        settle()
        stats = backend.device.memory_stats()
        # Enough for a step, but not with the margin.
        taken = [torch.empty(stats.free - (105 << 20), dtype=torch.uint8, device="npu")]
        message = r"graphs of up to 4 tokens need about 115\.\d MiB, and 1\d\d\.\d MiB are free\n.*cache.num_tokens"
        try:
            with pytest.raises(CaptureError, match=message):
                hal.Runner(model, backend)
        finally:
            taken.clear()
        check(hal.Runner(model, backend))

    def test_or_everything_runs_eagerly(self, opened: Opened, caplog: pytest.LogCaptureFixture) -> None:
        runner = hal.Runner(Toy(), opened({"max_streams": 2}, on_capture_error="eager"))
        check(runner)
        warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert len(warnings) == 2, warnings
        assert "decode batches run uncaptured: graphs of 3 sizes need 3 streams" in warnings[0]
        assert "a step of 4 sequences runs uncaptured: graphs of 3 sizes need 3 streams" in warnings[1]


class Wasteful(torch.nn.Module):
    """A projection that temporarily needs 100 MiB."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + x.new_zeros((100 << 20) // x.itemsize)[:1]


class TestMemory:
    def graphs(self, opened: Opened, sizes: Sequence[int]) -> int:
        """Return the device memory in bytes that graphs of these sizes need, including the cache, which is small."""
        backend = opened(capture_sizes=list(sizes))
        model = Toy(vocab_size=100_000)
        hal.Runner(model, backend)  # one-time allocations: workspaces, and torch_npu's own
        settle()
        before = emulated_cann.memory_in_use()
        runner = hal.Runner(model, backend)
        settle()
        taken = emulated_cann.memory_in_use() - before
        assert sum(tensor.nbytes for _, tensor in runner.states.tensors()) < 0.02 * taken
        return taken

    @thorough(AGAIN)
    def test_eight_buckets_take_little_more_than_the_largest(self, opened: Opened) -> None:
        eight = self.graphs(opened, [1, 2, 4, 8, 16, 32, 48, 64])
        largest = self.graphs(opened, [64])
        assert 12 << 20 < largest <= eight <= 1.15 * largest, (eight, largest)

    def test_outputs_of_a_bucket_keep_their_address(self, opened: Opened) -> None:
        runner = hal.Runner(Toy(), opened(capture_sizes=[4]))
        blocks = prefilled(runner)
        assert len({runner.step(step(runner, blocks, rows)).logits.data_ptr() for rows in (1, 4, 2, 3)}) == 1


class TestDebug:
    @pytest.mark.parametrize("what", ["weight", "cache"])
    def test_a_replaced_tensor_is_named(self, opened: Opened, what: str) -> None:
        runner = hal.Runner(Toy(), opened(debug=True))
        check(runner)
        blocks = prefilled(runner)
        if what == "weight":
            runner.model.out.weight.data = runner.model.out.weight.data.clone()
        else:
            layer: Any = runner.states.layers[0]
            layer["value"] = layer["value"].clone()
        named = {"weight": r"out\.weight has another address", "cache": "state 0.value has another address"}[what]
        with emulated_cann.trace() as trace, pytest.raises(GraphError, match=named):
            runner.step(step(runner, blocks))
        assert "graph" not in {record.kind for record in trace.records}


class TestFaults:
    """After each fault the same runner gives correct results."""

    def test_out_of_memory_in_a_capture(self, opened: Opened) -> None:
        model, backend = Toy(), opened()
        model.out = Wasteful(model.out)
        check(hal.Runner(model, backend))
        taken = cached()
        with emulated_cann.faults.allocation(first=2), pytest.raises(CaptureError, match="no memory left") as caught:
            hal.Runner(model, backend)
        del taken
        assert "max_capture_size" in caught.value.remedy
        check(hal.Runner(model, backend))

    @thorough(MODE)
    @pytest.mark.parametrize("phase", ["prefill", "decode"])
    def test_out_of_memory_in_a_step(self, npu: Opened, phase: str) -> None:
        model = Toy()
        model.out = Wasteful(model.out)
        runner = hal.Runner(model, npu(cache={"num_tokens": 2048}))
        blocks = prefilled(runner)
        taken = cached()
        batch = step(runner, blocks)
        if phase == "prefill":
            batch = runner.batch([[1, 2], [3]], blocks[:2], cached=[150, 3])
        with emulated_cann.faults.allocation(), pytest.raises(DeviceOutOfMemory, match="no memory left") as caught:
            runner.step(batch)
        del taken
        assert "cache.num_tokens" in caught.value.remedy
        check(runner)

    def test_out_of_streams(self, opened: Opened, caplog: pytest.LogCaptureFixture) -> None:
        model = Toy()
        check(hal.Runner(model, opened()))
        with (
            emulated_cann.faults.streams(),
            pytest.raises(CaptureError, match=r"no stream left for it \(207008") as caught,
        ):
            hal.Runner(model, opened())
        assert "compilation.max_capture_size" in caught.value.remedy
        caplog.clear()
        with emulated_cann.faults.streams(first=2):
            runner = hal.Runner(model, opened(on_capture_error="eager"))
        told = "decode batches of 2 sequences run in a larger bucket or uncaptured: the captured function cannot be"
        assert told in caplog.text
        check(runner)

    def test_a_synchronising_call(self, opened: Opened, caplog: pytest.LogCaptureFixture) -> None:
        """The trace meets the call; or the capture, for sizes captured from the model's Python code."""
        with pytest.raises(CompileError, match=r"Toy cannot be traced, in forward at .*test_npu_runner\.py:\d+: "):
            hal.Runner(Toy(reads_above=2), opened())
        with pytest.raises(CaptureError, match=r"cannot be captured: it (synchronizes|makes a call)"):
            hal.Runner(Toy(reads_above=2), opened(torch_compile_max_bs=2))
        runner = hal.Runner(Toy(reads_above=2), opened(on_capture_error="eager"))
        assert caplog.text.count("decode batches of 4 sequences run in a larger bucket or uncaptured") == 1
        caplog.clear()
        check(runner)
        check(runner)
        assert caplog.text.count("runs uncaptured") == 1

    @thorough(MODE, r"\[(Matmul|SwiGlu)")
    @thorough(EXHAUSTIVE, r"\[(Matmul-graph|SwiGlu-eager)")
    @pytest.mark.parametrize("compiler", ["eager", "graph"])
    @pytest.mark.parametrize("kernel", [ATTENTION, "Matmul", "SwiGlu"])
    def test_a_kernel_timeout(self, npu: Opened, trained: Path, compiler: str, kernel: str) -> None:
        backend = npu(compilation={"compiler": compiler, "capture_sizes": SIZES}, dtype="float16")
        runner = hal.Runner(hal.load_model(trained, backend), backend)

        def generated() -> list[int]:
            params = hal.SamplingParams(max_new_tokens=6)
            return [token.token_id for token in hal.generate(runner, [[5, 6, 7], [8] * 140], params)]

        expected = generated()
        with emulated_cann.faults.hang(kernel, 0.05, first=9), pytest.raises(DeviceError, match="507014") as caught:
            generated()
        assert "timed out" in caught.value.problem
        assert generated() == expected


def test_a_step_is_one_graph_and_one_update(opened: Opened, trained: Path) -> None:
    runner = hal.Runner(hal.load_model(trained, opened()), opened())
    blocks = prefilled(runner)
    calls: Counter[str] = Counter()

    def count(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.endswith("torch_npu/npu/graphs.py"):
            calls[frame.f_code.co_qualname] += 1

    batch = step(runner, blocks)
    runner.step(batch)
    torch.npu.synchronize()
    with emulated_cann.trace() as trace:
        sys.setprofile(count)
        runner.step(batch)
        sys.setprofile(None)
    assert calls["NPUGraph.replay"] == calls["NPUGraph.update"] == 1
    assert sum(record.kind == "graph" for record in trace.records) == 1
    assert trace.counts(phase="replay")[ATTENTION] == len(runner.model.states)
    assert sum(record.kind == "update" for record in trace.records) == len(runner.model.states)


def test_torch_npu_is_left_as_it_was() -> None:
    """Nothing in another package's namespace was replaced."""
    for module in (torch_npu, torch.npu, torch_npu.npu.graphs):
        ours = [name for name, value in vars(module).items() if getattr(value, "__module__", "").startswith("hal")]
        assert not ours
