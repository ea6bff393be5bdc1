"""Tests for piecewise steps on the NPU: results, memory, streams, and faults."""

from __future__ import annotations

import gc
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import emulated_cann
import pytest
import torch
import torch_npu  # noqa: F401 (it brings torch.npu)
from helpers.pieces import drawn, eagerly, form_of, marked, tokens_of, uncaptured
from helpers.thorough import MODE, thorough
from torch import Tensor

import hal
from hal import ops
from hal.errors import CaptureError, ConfigError
from hal.nn import Attention, CausalLM, Embedding, Linear, RMSNorm
from hal.nn.model import LayerState
from hal.step import ALL, LAST, Batch

Opened = Callable[..., hal.Backend]
DECODE, PREFILL = [2, 4], [8, 16, 140]
NATIVE = ("atb._npu_paged_attention", "npu.npu_fused_infer_attention_score")


class Deep(CausalLM):
    """A model whose layers all read tables that the first piece makes; each layer is wide inside."""

    vocab_size, max_length = 13, 512

    def __init__(self, layers: int = 3, width: int = 64) -> None:
        super().__init__()
        self.embedding, self.qkv = Embedding(13, 32), Linear(32, 6 * 16)
        self.attention, self.out, self.norm = Attention(2, 16), Linear(32, 32), RMSNorm(32, 1e-6)
        self.states = [self.attention.states] * layers
        self.up, self.down = Linear(32, width), Linear(width // 2, 32)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data = (torch.randn(parameter.shape, generator=generator) / 6).half().npu()

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Deep:
        return cls()

    def forward(self, batch: Batch, states: Sequence[LayerState]) -> Tensor:
        hidden = self.embedding(batch.token_ids)
        angles = (batch.positions.float()[:, None] * torch.arange(1, 9, device="npu")).repeat(1, 2)
        cos, sin = angles.cos().half(), angles.sin().half()
        for state in states:
            query, key, value = self.qkv(hidden).view(-1, 6, 16).split([2, 2, 2], dim=1)
            query, key = ops.rotary_embedding(query, key, cos, sin)
            hidden = hidden + self.out(self.attention(query, key, value, batch, state))
            hidden = hidden + self.down(ops.silu_and_mul(self.up(self.norm(hidden))))
        return self.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.embedding.as_linear(hidden)


@pytest.fixture
def opened(npu: Opened) -> Opened:
    def pieces(options: Mapping[str, Any] | None = None, *, most: int = 2048, **compilation: Any) -> hal.Backend:
        chosen = {"compiler": "piecewise", "capture_sizes": DECODE, "prefill": {"capture_sizes": PREFILL}}
        return npu(
            cache={"num_tokens": 2048},
            compilation={**chosen, **compilation},
            options=dict(options or {}),
            max_prefill_tokens=most,
        )

    npu()  # Models are made on the current device, which another test may have changed.
    return pieces


def assert_attention_is_launched(runner: hal.Runner) -> None:
    """Check that a decode step of three layers replays four graphs, and launches attention between them."""
    batch = drawn(runner, 1, [1] * 3, [9, 100, 0])
    runner.step(batch)
    torch.npu.synchronize()
    with emulated_cann.trace() as trace:
        runner.step(batch)
        torch.npu.synchronize()
    assert sum(record.kind == "graph" for record in trace.records) == 4
    assert trace.counts(phase="replay")["FusedInferAttentionScoreV3"] == 0
    assert trace.counts(phase="eager")["FusedInferAttentionScoreV3"] == 3


def assert_same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.cpu(), expected.cpu(), rtol=2e-2, atol=2e-2)


def check(runner: hal.Runner, sizes: Sequence[int] = (1, 7, 8, 9, 16, 17, 139, 140, 141)) -> None:
    for size in sizes:
        batch = drawn(runner, size, [size], [0])
        assert_same(runner.step(batch).logits, eagerly(runner, batch))
    for rows in (1, 2, 3, 4, 5) if len(sizes) > 1 else (2, 3):
        batch = drawn(runner, rows, [1] * rows, [63 * row for row in range(rows)])
        assert_same(runner.step(batch).logits, eagerly(runner, batch))


def settle() -> None:
    gc.collect()
    torch.npu.synchronize()
    torch.npu.empty_cache()


class TestSameAsEager:
    def test_around_every_bucket(self, opened: Opened) -> None:
        runner = hal.Runner(Deep(), opened(debug=True))
        assert (tokens_of(runner, "decode"), tokens_of(runner, "prefill")) == (DECODE, PREFILL)
        assert form_of(runner, "prefill").num_graphs == 4
        check(runner)
        check(runner)

    @pytest.mark.parametrize("most", [2048, 50])
    def test_mixed_prefill(self, opened: Opened, most: int) -> None:
        runner = hal.Runner(Deep(), opened(most=most))
        for seed in range(6):
            draw = random.Random(seed)
            count = draw.randint(2, 6)
            lengths, cached = ([draw.randint(low, 100) for _ in range(count)] for low in (1, 0))
            batch, rows = drawn(runner, seed, lengths, cached), LAST if seed % 2 else ALL
            assert_same(runner.step(batch, rows).logits, eagerly(runner, batch, rows))

    @thorough(MODE)
    @pytest.mark.parametrize("at", [["store_kv_cache", "paged_attention"], ["linear", "paged_attention"]])
    def test_at_several_operations(self, opened: Opened, at: list[str]) -> None:
        check(hal.Runner(Deep(2), opened(splitting_ops=at)), (3, 16, 20))


@thorough(MODE)
@pytest.mark.parametrize("name", NATIVE)
def test_native_names(opened: Opened, name: str) -> None:
    runner = hal.Runner(Deep(), opened(splitting_ops=[name]))
    split = form_of(runner, "decode").split
    assert split is not None
    assert [each.operations for each in split.segments if not each.captured][:3] == [("paged_attention",)] * 3


def test_unknown_names(opened: Opened) -> None:
    with pytest.raises(ConfigError, match=r"'atb._npu_paged_atention', .* not the name .*\n.*_npu_paged_attention"):
        opened(splitting_ops=["atb._npu_paged_atention"])


def test_attention_is_launched_and_the_rest_replayed(opened: Opened) -> None:
    assert_attention_is_launched(hal.Runner(Deep(), opened()))


@pytest.mark.parametrize("markers", [False, True])
def test_a_step_of_prompts_and_running_sequences_replays(opened: Opened, markers: bool) -> None:
    """Outside graphs, the trace has only attention, for each layer and number of queries."""
    backend = opened()
    runner = marked(Deep(), backend) if markers else hal.Runner(Deep(), backend)
    batch = drawn(runner, 1, [1, 6, 1], [9, 0, 100])

    def of_layers(trace: emulated_cann.Trace) -> int:
        counts = trace.counts(phase="eager").items()
        return sum(count for name, count in counts if any(part in name for part in ("Mat", "Rms", "Swi")))

    with emulated_cann.trace() as trace:
        expected = eagerly(runner, batch).cpu()
    assert of_layers(trace) >= 3 * 6
    runner.step(batch)
    torch.npu.synchronize()
    with emulated_cann.trace() as trace:
        found = runner.step(batch).logits
        torch.npu.synchronize()
    assert sum(record.kind == "graph" for record in trace.records) == 4
    assert trace.counts(phase="eager")["FusedInferAttentionScoreV3"] == 3 * 3
    assert of_layers(trace) == 1  # The logits, which have as many rows as the step asks for.
    assert_same(found, expected)


class TestFaults:
    @thorough(MODE)
    def test_streams_are_counted(self, opened: Opened, caplog: pytest.LogCaptureFixture) -> None:
        with pytest.raises(CaptureError, match="graphs of 2 sizes need 8 streams, and 7 are left"):
            hal.Runner(Deep(), opened({"max_streams": 7}))
        backend = opened({"max_streams": 20})
        runner = hal.Runner(Deep(), backend)
        assert backend.streams_in_graphs == 20
        with pytest.raises(CaptureError, match="need 8 streams, and 0 are left"):
            hal.Runner(Deep(), backend)
        check(runner, (9,))
        caplog.clear()
        runner = hal.Runner(Deep(), opened({"max_streams": 8}, on_capture_error="eager"))
        assert "prefill batches run uncaptured: graphs of 3 sizes need 12 streams, and 0 are left" in caplog.text
        check(runner, (9,))

    def test_out_of_streams(self, opened: Opened, caplog: pytest.LogCaptureFixture) -> None:
        model = Deep()
        with emulated_cann.faults.streams(), pytest.raises(CaptureError, match=r"no stream left for it \(207008"):
            hal.Runner(model, opened())
        caplog.set_level(logging.WARNING)
        with emulated_cann.faults.streams(first=6):
            runner = hal.Runner(model, opened(on_capture_error="eager"))
        assert "decode batches of 2 tokens run in a larger bucket or uncaptured" in caplog.text
        check(runner, (9,))


class TestMarkers:
    """Piecewise steps without a compiler."""

    @pytest.mark.parametrize("at", [["paged_attention"], ["linear", "paged_attention"]])
    def test_around_every_bucket(self, opened: Opened, at: list[str]) -> None:
        runner = marked(Deep(), opened(splitting_ops=at))
        check(runner)
        for seed in range(3):
            batch, rows = drawn(runner, seed, [60, 9, 30], [0, 130, 5]), ALL if seed else LAST
            assert_same(runner.step(batch, rows).logits, eagerly(runner, batch, rows))

    def test_attention_is_launched_and_the_rest_replayed(self, opened: Opened) -> None:
        assert_attention_is_launched(marked(Deep(), opened()))

    @thorough(MODE)
    @pytest.mark.parametrize("make", [marked, hal.Runner], ids=["markers", "traced"])
    def test_pieces_and_buckets_share_memory(self, opened: Opened, make: Callable[..., hal.Runner]) -> None:
        def taken(sizes: Sequence[int], layers: int = 2) -> int:
            backend = opened(prefill={"capture_sizes": list(sizes)}, decode={"compiler": "eager"})
            model = Deep(layers, 2 * 8192)
            states = uncaptured(model, backend).spec.nbytes
            settle()
            before = torch.npu.memory_reserved()
            runner = make(model, backend)
            settle()
            assert tokens_of(runner, "prefill") == sizes
            return torch.npu.memory_reserved() - before - states

        taken([512])  # with one-time allocations
        few, many, buckets = taken([512]), taken([512], 5), taken([4, 8, 16, 32, 64, 128, 256, 512])
        assert many <= 1.15 * few, (many, few)
        assert 8 << 20 < few <= buckets <= 1.15 * few, (buckets, few)
