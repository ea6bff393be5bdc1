"""Tests for the NPU's kernels: results against the references, launches, and restrictions of the hardware."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import emulated_cann
import pytest
import torch
from helpers.kernel_checks import check_kernel, draw_on, on_cpu
from helpers.npu.drawn import attention_arguments, drawn_attention
from helpers.thorough import EXHAUSTIVE, thorough

import hal
from hal import ops
from hal.errors import CaptureError, ConfigError, HostValueError, OperationError
from hal.nn import Embedding, Linear, WeightUse
from hal.ops import Draw, Operation, Sample
from hal.ops.forms import FLOAT
from hal.ops.tolerance import assert_agree
from hal.testing.compared_call import prepare_weights

DTYPES = (torch.float16, torch.bfloat16)
OPERATIONS = list(ops.catalogue().values())
ATTENTION = ops.operation("paged_attention")
FRACTAL_NZ = 29

Opened = Callable[..., hal.Backend]


def each_operation() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("operation", OPERATIONS, ids=lambda each: each.name)


@thorough(EXHAUSTIVE, r"\[schedule=[1-9]")
@each_operation()
@pytest.mark.parametrize("seed", range(3), ids="schedule={}".format)
def test_under_any_schedule(npu: Opened, seed: int, operation: Operation) -> None:
    backend = npu()
    for sample in list(draw_on("npu", operation, torch.float16, 1))[:3]:
        with emulated_cann.schedule(seed):
            check_kernel(operation, torch.float16, getattr(backend.ops, operation.name), sample)


def test_of_no_tokens(npu: Opened) -> None:
    """The conformance suite has calls with no rows of the operations that are row-wise and take no host values."""
    backend, draw = npu(), Draw(torch.float16, "npu")
    calls = {
        "paged_attention": [
            attention_arguments(draw, [0] * rows, [9] * rows, head_dim=dim) for rows in (1, 3) for dim in (64, 128)
        ],
        "embedding": [(torch.zeros(0, dtype=torch.int64, device="npu"), draw.normal(8, 64), None, None, None, FLOAT)],
    }
    for name, samples in calls.items():
        for sample in samples:
            check_kernel(ops.operation(name), torch.float16, getattr(backend.ops, name), sample)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_convolution_of_a_decode_rounds_once(npu: Opened, dtype: torch.dtype) -> None:
    """The norms and states after it enlarge what a rounding before SiLU would add."""
    backend, draw = npu(), Draw(dtype, "npu")
    x, weight, window = draw.normal(8, 64), draw.normal(4, 64), draw.normal(8, 3, 64)
    rows = torch.cat((window.cpu(), x.cpu().unsqueeze(1)), 1).double()
    exact = torch.nn.functional.silu((rows * weight.cpu().double()).sum(1))
    starts = torch.arange(9, dtype=torch.int32)
    slots, on_npu = starts[:8].to("npu"), starts.to("npu")
    found = backend.ops.causal_conv1d(x, weight, None, window, slots, None, on_npu, starts, True).cpu().double()
    half_a_step = 1.01 * torch.finfo(dtype).eps / 2
    assert bool(((found - exact).abs() <= half_a_step * exact.abs() + 1e-6).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates_round_once(npu: Opened, dtype: torch.dtype) -> None:
    """The decay is float32, whose logarithm adds up over a text."""
    backend, draw = npu(), Draw(dtype, "npu")
    a, b = draw.normal(8, 64, scale=3.0), draw.normal(8, 64, scale=3.0)
    factor, dt_bias = -draw.normal(64).float().exp(), draw.normal(64).float()
    exact = factor.cpu().double() * torch.nn.functional.softplus(a.cpu().double() + dt_bias.cpu().double())
    rate = torch.sigmoid(b.cpu().double())
    decay, beta = (each.cpu().double() for each in backend.ops.delta_rule_gates(a, b, factor, dt_bias))
    assert bool(((decay - exact).abs() <= 1e-6 * exact.abs()).all())
    assert bool(((beta - rate).abs() <= 1.01 * torch.finfo(dtype).eps / 2 * rate).all())


class TestAttention:
    @thorough(EXHAUSTIVE, r"\[seed=([6-9]|\d\d)-")
    @pytest.mark.parametrize("option", ["fused", "atb"])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("seed", range(48), ids="seed={}".format)
    def test_of_all_kinds(self, npu: Opened, seed: int, dtype: torch.dtype, option: str) -> None:
        backend = npu(options={"attention": option})
        check_kernel(ATTENTION, dtype, backend.ops.paged_attention, drawn_attention(seed, dtype))

    @pytest.mark.parametrize("option", ["fused", "atb"])
    @pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
    @pytest.mark.parametrize(
        "case",
        [
            {"query_lens": [2, 0], "kv_lens": [9, 130]},  # two tokens and two sequences, but not one token each
            {"query_lens": [1, 1], "kv_lens": [9, 130], "left_over": 2},
            {"query_lens": [5], "kv_lens": [5], "left_over": 1},
            {"query_lens": [0, 0], "kv_lens": [5, 0], "left_over": 2},
            {"query_lens": [1, 1, 1], "kv_lens": [0, 0, 0]},
            {"query_lens": [1, 1, 1], "kv_lens": [0, 200, 0], "window": 50},
            {"query_lens": [3, 4], "kv_lens": [0, 200]},
            {"query_lens": [1] * 5, "kv_lens": [1, 127, 128, 129, 257], "window": 128},
            {"query_lens": [130, 1, 3], "kv_lens": [260, 128, 140], "window": 128},
            {"query_lens": [130, 1, 3], "kv_lens": [260, 128, 140], "window": 9, "causal": False},
            {"query_lens": [9, 1, 3], "kv_lens": [260, 128, 140], "block_size": 256},
            {"query_lens": [1, 1], "kv_lens": [260, 128], "block_size": 512},
        ],
        ids=str,
    )
    def test_where_it_is_particular(self, npu: Opened, case: dict[str, Any], head_dim: int, option: str) -> None:
        backend = npu(options={"attention": option})
        sample = attention_arguments(Draw(torch.float16, "npu", 3), **case, head_dim=head_dim)
        check_kernel(ATTENTION, torch.float16, backend.ops.paged_attention, sample)

    def test_a_table_and_queries_that_are_strided(self, npu: Opened) -> None:
        backend = npu()
        for new in ([1, 1, 1], [5, 2, 30]):
            query, *caches, table, starts, lens, _, _, sinks, options = attention_arguments(
                Draw(torch.float16, "npu"), new, [200, 129, 40]
            )
            wide, turned = table.repeat(1, 2)[:, : table.shape[1]], query.transpose(0, 1).contiguous().transpose(0, 1)
            assert not wide.is_contiguous()
            assert not turned.is_contiguous()
            rest = starts.cpu(), lens.cpu(), sinks, options
            sample = (turned, *caches, wide, starts, lens, *rest)
            check_kernel(ATTENTION, torch.float16, backend.ops.paged_attention, sample)

    @pytest.mark.parametrize(
        ("dtype", "head_dim", "packed"),
        [(torch.bfloat16, 128, True), (torch.bfloat16, 192, False), (torch.float16, 128, False)],
        ids=str,
    )
    def test_what_every_release_of_cann_packs(
        self, npu: Opened, dtype: torch.dtype, head_dim: int, packed: bool
    ) -> None:
        backend = npu()
        sample = attention_arguments(Draw(dtype, "npu"), [5, 7], [5, 200], head_dim=head_dim)
        with emulated_cann.trace() as trace:
            backend.ops.paged_attention(*sample)
        queries = [each.operands[0].shape for each in trace.ran() if each.name == "FusedInferAttentionScoreV3"]
        assert queries == ([(12, 4, head_dim)] if packed else [(1, n, 4 * head_dim) for n in (5, 7)])

    @pytest.mark.parametrize(
        ("dtype", "head_dim"), [(torch.float16, 64), (torch.float16, 128), (torch.bfloat16, 128)], ids=str
    )
    def test_a_window_in_a_graph(self, npu: Opened, dtype: torch.dtype, head_dim: int) -> None:
        """Replays read new lengths on the host and on the device, where they determine the mask of the BSH layout."""
        backend, rows = npu(), 4
        sample = attention_arguments(
            Draw(dtype, "npu"), [1] * rows, [300] * rows, head_dim=head_dim, window=70, unused=0.0
        )
        kv_lens, starts_host = sample[5], sample[6]
        graph = backend.graph()
        found = graph.capture(lambda: ops.paged_attention(*sample))
        for lengths in ([300, 1, 70, 128], [71, 69, 0, 129], [0, 0, 9, 0], [128, 256, 200, 300]):
            lens = torch.tensor(lengths, dtype=torch.int32)
            kv_lens.copy_(lens)
            graph.replay(kv_lens_host=lens, query_start_loc_host=starts_host)
            expected = ATTENTION.reference(*on_cpu((*sample[:7], lens, *sample[8:])))
            assert_agree(ATTENTION, dtype, found, expected, f"{lengths}")

    def test_a_window_over_a_table_that_is_too_wide(self, npu: Opened) -> None:
        backend = npu()
        sample = list(attention_arguments(Draw(torch.float16, "npu"), [1], [5], head_dim=64, window=3))
        wide = torch.nn.functional.pad(sample[3], (0, 2048 - sample[3].shape[1]))
        check_kernel(ATTENTION, torch.float16, backend.ops.paged_attention, (*sample[:3], wide, *sample[4:]))
        wide = torch.nn.functional.pad(wide, (0, 1))
        with pytest.raises(OperationError, match=r"block table of 262272 slots .* limit is 262144") as caught:
            backend.ops.paged_attention(*sample[:3], wide, *sample[4:])
        assert "at most 2048 columns" in caught.value.remedy

    def test_a_capture_of_several_launches_is_refused(self, npu: Opened) -> None:
        """The launches would share one name for their lengths, and a replay would set all lengths in each of them."""
        backend = npu()
        sample = attention_arguments(Draw(torch.float16, "npu"), [5, 7], [5, 200], head_dim=64)
        with pytest.raises(CaptureError, match="several launches of attention"):
            backend.graph().capture(lambda: ops.paged_attention(*sample))
        check_kernel(ATTENTION, torch.float16, backend.ops.paged_attention, sample)


@pytest.mark.parametrize(
    ("dtype", "heads", "head_dim", "turned"),
    [
        (torch.bfloat16, 76, 128, 1),
        (torch.bfloat16, 77, 128, 2),
        (torch.float16, 152, 128, 1),
        (torch.float16, 153, 128, 2),
        (torch.bfloat16, 152, 64, 1),
        (torch.bfloat16, 153, 64, 2),
    ],
    ids=str,
)
def test_heads_that_are_turned_in_one_launch(
    npu: Opened, dtype: torch.dtype, heads: int, head_dim: int, turned: int
) -> None:
    """One launch rotates as many heads as fit in the unified buffer; more take two launches."""
    backend, draw, operation = npu(), Draw(dtype, "npu"), ops.operation("split_qkv_rmsnorm_rope")
    angles = draw.normal(2, head_dim // 2).float().repeat(1, 2)
    sample = (
        draw.normal(2, (heads + 4) * head_dim),
        draw.normal(head_dim),
        draw.normal(head_dim),
        angles.cos().to(dtype),
        angles.sin().to(dtype),
        1e-6,
        heads - 4,
        4,
    )
    with emulated_cann.trace() as trace:
        check_kernel(operation, dtype, backend.ops.split_qkv_rmsnorm_rope, sample)
    assert trace.counts()["ApplyRotaryPosEmbV2" if turned == 1 else "RotaryPositionEmbeddingV2"] == turned


class TestSharedBlocks:
    """Attention refuses prefills whose blocks, summed over the sequences, exceed those of the cache."""

    def sample(self, dtype: torch.dtype, new: list[int], lens: list[int], **given: Any) -> Sample:
        """Return sequences that share their first two blocks, in a cache with only as many blocks as they use."""
        query, *caches, table, starts, kv_lens, starts_host, lens_host, sinks, options = attention_arguments(
            Draw(dtype, "npu", 7), new, lens, unused=0.0, **given
        )
        rows, blocks = len(lens), 2 + len(lens)
        table = torch.tensor([[0, 1, 2 + row] for row in range(rows)], dtype=torch.int32, device="npu")
        caches = [cache[:blocks].contiguous() for cache in caches]
        return query, *caches, table, starts, kv_lens, starts_host, lens_host, sinks, options

    @pytest.mark.parametrize(
        ("dtype", "new", "given", "launches"),
        [
            (torch.bfloat16, [3, 1, 9], {}, 3),
            (torch.bfloat16, [1, 1, 1], {"window": 50}, 3),
            (torch.bfloat16, [1, 1, 1], {}, 1),
            (torch.bfloat16, [3, 0, 9], {"left_over": 2}, 2),
            (torch.float16, [3, 3, 3], {}, 3),
            (torch.float16, [1, 3, 3], {}, 3),
        ],
        ids=str,
    )
    def test_a_call_takes_as_many_as_fit(
        self, npu: Opened, dtype: torch.dtype, new: list[int], given: dict[str, Any], launches: int
    ) -> None:
        backend, sample = npu(), self.sample(dtype, new, [300, 299, 270], **given)
        with emulated_cann.trace() as trace:
            check_kernel(ATTENTION, dtype, backend.ops.paged_attention, sample)
        assert trace.counts()["FusedInferAttentionScoreV3"] == launches

    def test_one_call_where_they_fit(self, npu: Opened) -> None:
        backend, sample = npu(), self.sample(torch.bfloat16, [3, 3, 9], [300, 9, 128])
        with emulated_cann.trace() as trace:
            check_kernel(ATTENTION, torch.bfloat16, backend.ops.paged_attention, sample)
        assert trace.counts()["FusedInferAttentionScoreV3"] == 1

    @pytest.mark.parametrize(("dtype", "new"), [(torch.bfloat16, [3, 1, 9]), (torch.float16, [3, 3, 3])], ids=str)
    def test_no_capture_of_it(self, npu: Opened, dtype: torch.dtype, new: list[int]) -> None:
        backend, sample = npu(), self.sample(dtype, new, [300, 299, 270])
        with pytest.raises(CaptureError, match=r"sequences that share blocks .* need several launches"):
            backend.graph().capture(lambda: ops.paged_attention(*sample))

    def test_no_replay_of_it(self, npu: Opened) -> None:
        """With a window, where only the lengths reveal shared blocks."""
        backend, sample = npu(), self.sample(torch.bfloat16, [1, 1, 1], [257, 1, 1], window=50)
        kv_lens, starts_host = sample[5], sample[6]
        graph = backend.graph()
        found = graph.capture(lambda: ops.paged_attention(*sample))
        with (
            emulated_cann.trace() as trace,
            pytest.raises(HostValueError, match=r"captured over 5 blocks, .* the 3 sequences"),
        ):
            graph.replay(kv_lens_host=[300, 299, 270], query_start_loc_host=starts_host)
        assert not trace.records
        lens = torch.tensor([258, 2, 7], dtype=torch.int32)
        kv_lens.copy_(lens)
        graph.replay(kv_lens_host=lens, query_start_loc_host=starts_host)
        expected = ATTENTION.reference(*on_cpu((*sample[:7], lens, *sample[8:])))
        assert_agree(ATTENTION, torch.bfloat16, found, expected)


class TestLongerThanTheCache:
    """Of a sequence that has given its first blocks away, attention needs only the window, but counts all blocks."""

    def sample(self, dtype: torch.dtype, new: list[int]) -> Sample:
        """Return a sequence of five blocks, of which it has the last, and one of one, in a cache of three."""
        query, *caches, _, starts, kv_lens, starts_host, lens_host, sinks, options = attention_arguments(
            Draw(dtype, "npu", 7), new, [600, 40], unused=0.0, window=50
        )
        table = torch.tensor([[0, 0, 0, 0, 1], [2, 0, 0, 0, 0]], dtype=torch.int32, device="npu")
        caches = [cache[:3].contiguous() for cache in caches]
        return query, *caches, table, starts, kv_lens, starts_host, lens_host, sinks, options

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize(("new", "launches"), [([1, 1], 1), ([3, 3], 0), ([7, 1], 0)], ids=str)
    def test_prefills_run_without_fused_attention(
        self, npu: Opened, dtype: torch.dtype, new: list[int], launches: int
    ) -> None:
        backend, sample = npu(), self.sample(dtype, new)
        with emulated_cann.trace() as trace:
            check_kernel(ATTENTION, dtype, backend.ops.paged_attention, sample)
        assert trace.counts().get("FusedInferAttentionScoreV3", 0) == launches

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_no_capture_of_a_prefill(self, npu: Opened, dtype: torch.dtype) -> None:
        backend, sample = npu(), self.sample(dtype, [3, 3])
        with pytest.raises(CaptureError, match="sequences that are longer than the cache"):
            backend.graph().capture(lambda: ops.paged_attention(*sample))

    def test_no_replay_of_a_single_one(self, npu: Opened) -> None:
        sample = self.sample(torch.bfloat16, [3, 3])
        query, keys, values, table, starts, kv_lens, starts_host, lens_host, *options = sample
        short = kv_lens[:1].clamp(max=100), starts_host[:2], lens_host[:1].clamp(max=100)
        graph = npu().graph()
        graph.capture(
            lambda: ops.paged_attention(
                query[:3], keys, values, table[:1], starts[:2], short[0], short[1], short[2], *options
            )
        )
        with pytest.raises(HostValueError, match=r"captured over 3 blocks, and the 1 sequences have more"):
            graph.replay(kv_lens_host=[600], query_start_loc_host=starts_host[:2])


class TestLaunches:
    @pytest.mark.parametrize(
        ("name", "number", "expected"),
        [
            ("rms_norm", 1, {"RmsNorm": 1}),
            ("rms_norm", 4, {"RmsNorm": 1}),  # not contiguous
            ("add_rms_norm", 1, {"AddRmsNorm": 1}),
            ("add_rms_norm", 3, {"Add": 1, "RmsNorm": 1}),  # a float32 weight
            ("layer_norm", 3, {"LayerNorm": 1}),
            ("gelu", 3, {"GeluV2": 1}),
            ("gelu_and_mul", 3, {"GeGluV3": 1}),
            ("clipped_silu_and_mul", 1, {"ClippedSwiglu": 1}),
            ("silu_and_mul", 1, {"SwiGlu": 1}),
            ("linear", 2, {"Matmul": 1}),
            ("linear", 3, {"Addmm": 1}),
            ("embedding", 2, {"Embedding": 1}),
            ("rotary_embedding", 1, {"RotaryPositionEmbeddingV2": 2}),
            ("store_kv_cache", 1, {"ScatterPaKvCache": 1}),
            ("store_kv_cache", 3, {"ScatterPaKvCache": 1, "InplaceCopy": 2}),  # both not contiguous
            ("paged_attention", 3, {"FusedInferAttentionScoreV3": 1}),
            ("paged_attention", 6, {"FusedInferAttentionScoreV3": 1, "Subs": 1, "LtTensor": 1}),  # a window of 64
            ("greedy_sample", 1, {"ArgMax": 1}),
            ("gated_rms_norm", 1, {"RmsNorm": 1, "Silu": 1, "Mul": 1}),
            ("split_qkv_rmsnorm_rope", 1, {"RmsNorm": 2, "ApplyRotaryPosEmbV2": 1}),
            ("split_qkv_rmsnorm_rope", 2, {"RmsNorm": 2, "RotaryPositionEmbeddingV2": 2}),  # a window of 32
            (
                "split_qkv_rmsnorm_rope_cache",
                1,
                {"RmsNorm": 2, "ApplyRotaryPosEmbV2": 1, "ScatterPaKvCache": 1, "InplaceCopy": 1},
            ),
        ],
    )
    def test_each_takes_no_more_than_it_must(
        self, npu: Opened, name: str, number: int, expected: dict[str, int]
    ) -> None:
        backend = npu()
        sample = list(draw_on("npu", ops.operation(name), torch.float16, 0))[number]
        torch.npu.synchronize()
        with emulated_cann.trace() as trace:
            getattr(backend.ops, name)(*sample)
        assert trace.counts() == expected
        assert not trace.ran("copy")

    def test_recurrent_layers(self, npu: Opened) -> None:
        """A decode copies nothing to the device; the delta rule is fused if the state is in bfloat16."""
        backend = npu()
        cases = (
            ("causal_conv1d", 6, ("IndexSelect", "Cat", "ScatterNdUpdate", "Mul", "ReduceSum", "Silu", "InplaceCopy")),
            ("delta_rule_gates", 0, ("Add", "Softplus", "Mul", "Sigmoid")),
            (
                "gated_delta_rule",
                0,
                (
                    *("IndexSelect", "Exp", "InplaceMul", "InplaceCopy", "Matmul", "Sub", "Mul", "Addcmul"),
                    *("ScatterNdUpdate", "InplaceCopy", "Matmul", "Muls"),
                ),
            ),
            ("gated_delta_rule", 7, ("RecurrentGatedDeltaRule",)),
            ("l2_norm", 0, ("RmsNorm",)),
        )
        for name, number, expected in cases:
            operation = ops.operation(name)
            sample = list(draw_on("npu", operation, torch.bfloat16, 0))[number]
            sample = prepare_weights(backend, operation, sample, torch.bfloat16)
            getattr(backend.ops, name)(*sample)  # makes its constants
            torch.npu.synchronize()
            with emulated_cann.trace() as trace:
                getattr(backend.ops, name)(*sample)
            assert trace.counts() == Counter(expected), name
            assert not trace.ran("copy")

    @pytest.mark.parametrize("option", ["fused", "atb"])
    def test_attention(self, npu: Opened, option: str) -> None:
        backend, draw = npu(options={"attention": option}), Draw(torch.bfloat16, "npu")
        decode = "PagedAttentionOperation" if option == "atb" else "FusedInferAttentionScoreV3"
        fused = {"FusedInferAttentionScoreV3": 1}
        for new, lens, given, expected in (
            ([1, 1], [9, 200], {}, {decode: 1}),
            ([1, 1], [9, 200], {"head_dim": 192}, fused),  # a block of ATB holds 16,384 elements of such a head
            ([1, 1], [9, 200], {"head_dim": 256}, {decode: 1}),
            ([1, 1], [9, 200], {"head_dim": 288}, {decode: 1}),
            ([1, 1], [9, 200], {"window": 60}, fused),
            ([9, 20], [9, 200], {}, fused),
            ([9], [200], {"head_dim": 64}, fused),
            ([9, 9], [200, 9], {"head_dim": 64}, fused),
            ([9, 20, 20], [200, 20, 30], {"head_dim": 64}, {"FusedInferAttentionScoreV3": 2, "Cat": 1}),
            ([1, 1], [9, 200], {"head_dim": 64, "with_sinks": True}, {"FusedInferAttentionScoreV4": 1}),
            ([1, 20], [9, 200], {"window": 60, "with_sinks": True}, {"FusedInferAttentionScoreV4": 1}),
            (
                [1, 1],
                [9, 200],
                {"head_dim": 192, "with_sinks": True},
                {"FusedInferAttentionScoreV3": 1, "InplaceCopy": 2, "Sub": 1, "Sigmoid": 1, "Mul": 1},
            ),
        ):
            sample = attention_arguments(draw, new, lens, **given)
            torch.npu.synchronize()
            with emulated_cann.trace() as trace:
                backend.ops.paged_attention(*sample)
            assert trace.counts() == expected, (new, given)

    def test_a_softcap_is_composed(self, npu: Opened) -> None:
        backend, draw = npu(), Draw(torch.bfloat16, "npu")
        for new, lens in (([1, 1, 1], [9, 200, 0]), ([9, 20], [9, 200])):
            sample = attention_arguments(draw, new, lens, softcap=2.0)
            with emulated_cann.trace() as trace:
                check_kernel(ATTENTION, torch.bfloat16, backend.ops.paged_attention, sample)
            assert not [name for name in trace.counts() if "Attention" in name]
        with pytest.raises(CaptureError, match="composed of smaller operations"):
            backend.graph().capture(lambda: ops.paged_attention(*sample))

    def test_sampling_copies_nothing_to_the_device(self, npu: Opened) -> None:
        """A copy from the host waits for all previous launches, and a capture refuses it."""
        backend = npu()
        sample = list(draw_on("npu", ops.operation("sample"), torch.float16, 0))[-1]
        torch.npu.synchronize()
        with emulated_cann.trace() as trace:
            expected = backend.ops.sample(*sample)
        assert not trace.ran("copy")
        graph = backend.graph()
        found = graph.capture(lambda: ops.sample(*sample))
        graph.replay()
        assert torch.equal(found.cpu(), expected.cpu())


class TestFractalWeights:
    def test_one_that_stays_as_it_was_is_an_error(self, npu: Opened) -> None:
        backend = npu(options={"nz_weights": True})
        torch.npu.config.allow_internal_format = False
        weight = torch.zeros(32, 64, dtype=torch.float16, device="npu")
        try:
            with pytest.raises(ConfigError, match=r"kept a weight of shape \[32, 64\] in the format"):
                backend.prepare_weights({"weight": weight}, WeightUse("linear", torch.float16))
        finally:
            torch.npu.config.allow_internal_format = True

    def test_a_part_of_larger_memory_is_cast(self, npu: Opened) -> None:
        """The loader assembles weights in a buffer that it reuses."""
        import torch_npu

        backend, memory = npu(options={"nz_weights": True}), Draw(torch.float16, "npu").normal(4096)
        weight = memory[:2048].view(32, 64)
        prepared = backend.prepare_weights({"weight": weight}, WeightUse("linear", torch.float16))["weight"]
        assert torch_npu.get_npu_format(prepared) == FRACTAL_NZ
        before, x = weight.cpu(), Draw(torch.float16, "npu", 1).normal(3, 64)
        memory.zero_()
        expected = ops.operation("linear").reference(x.cpu(), before)
        torch.npu.synchronize()
        with emulated_cann.trace() as trace:
            found = backend.ops.linear(x, prepared)
        assert_agree(ops.operation("linear"), torch.float16, found, expected)
        assert not any("TransData" in name for name in trace.counts()), "the layout must not change back"

    def test_a_model_gives_the_same_logits(self, npu: Opened, trained: Path) -> None:
        """The table is kept as it is for lookup, with a FRACTAL_NZ copy for the projection."""
        import torch_npu

        logits = []
        for nz_weights in (False, True):
            backend = npu(dtype="float16", options={"nz_weights": nz_weights}, cache={"num_tokens": 1024})
            model = hal.load_model(trained, backend)
            runner = hal.Runner(model, backend)
            prefill = runner.step(runner.batch([[5, 6, 7, 8], [9] * 130], [[1], [2, 3]])).logits.cpu()
            decode = runner.step(runner.batch([[10], [11]], [[1], [2, 3]], cached=[4, 130])).logits.cpu()
            logits.append((prefill, decode))
            table = next(module for module in model.modules() if isinstance(module, Embedding))
            assert torch_npu.get_npu_format(table.weight) != FRACTAL_NZ
            projections = [layer.weight for layer in model.modules() if isinstance(layer, Linear)]
            formats = {torch_npu.get_npu_format(weight) for weight in projections}
            if nz_weights:
                assert torch_npu.get_npu_format(table.projection) == FRACTAL_NZ
                assert formats == {FRACTAL_NZ}
            else:
                assert table.projection is None
                assert FRACTAL_NZ not in formats
        torch.testing.assert_close(logits[1], logits[0], rtol=2e-3, atol=2e-2)
