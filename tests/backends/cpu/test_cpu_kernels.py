"""Tests for the CPU's C++ kernels and packed weights: when they are used, what they refuse, and capture on a tape."""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hal.backends.cpu import capabilities, packing
from hal.backends.cpu import kernels as by_torch
from hal.backends.cpu.driver import KERNELS
from hal.backends.cpu.native import build
from hal.backends.cpu.native.attention_kernels import FEW, AttentionKernels
from hal.backends.cpu.native.compiler import compiler
from hal.backends.cpu.native.kernels import NATIVE
from hal.backends.cpu.native.latent_kernels import LATENT_KERNELS
from hal.backends.cpu.native.processor import processor_flags
from hal.backends.cpu.native.recurrent_kernels import RECURRENT_KERNELS
from hal.backends.cpu.native.selection_kernels import SELECTION_KERNELS
from hal.backends.cpu.native.stream_kernels import STREAM_KERNELS
from hal.backends.cpu.packing import ROWS, Layout, Measured, Packing, linear
from helpers.attending import paged_sample
from helpers.reference import prompts
from helpers.thorough import DRAW, DTYPE, EXHAUSTIVE, MODE, PROCESSES, thorough
from torch import Tensor

import hal
from hal import ops
from hal.errors import DriverUnavailable, GraphError, OperationError
from hal.nn import WeightUse
from hal.ops import AttentionOptions, Draw, GatedActivation
from hal.ops.forms import FLOAT
from hal.ops.tolerance import assert_agree
from hal.vendor import AddedKernel

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ATTENTION = ops.operation("paged_attention")
TORCHS = {"embedding", "linear"}
"""Operations whose C++ kernels leave to torch what they do not take."""
Kernel = Callable[..., Any]
needs_pairs = pytest.mark.skipif(
    "avx512_bf16" not in processor_flags(), reason="attention by tiles also multiplies pairs, as this processor cannot"
)


def open_cpu(**options: Any) -> hal.Backend:
    return hal.open({"backend": "cpu", "options": options})


def attended(
    query: Tensor,
    caches: Sequence[Tensor],
    table: Tensor,
    starts: Tensor,
    lens: Tensor,
    scale: float,
    sinks: Tensor | None = None,
    **options: Any,
) -> tuple[Any, ...]:
    """Return the arguments of paged_attention."""
    return query, *caches, table, starts, lens, starts, lens, sinks, AttentionOptions(scale, **options)


@thorough(DRAW, r"\[seed=[1-9]")
@thorough(DTYPE, r"\.float16\]")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [name for name in NATIVE if name in KERNELS])
@pytest.mark.parametrize("seed", range(3), ids="seed={}".format)
def test_kernels_of_torch_meet_the_reference(seed: int, name: str, dtype: torch.dtype) -> None:
    operation, kernel = ops.operation(name), open_cpu(native=False).kernels[name]
    for sample in operation.samples(Draw(dtype, seed=seed)):
        ours, theirs = ([value.clone() if isinstance(value, Tensor) else value for value in sample] for _ in range(2))
        found, expected = kernel(*ours), operation.reference(*theirs)
        if operation.mutates:
            found, expected = tuple(ours), tuple(theirs)
        assert_agree(operation, dtype, found, expected)


@thorough(DTYPE, r"\[heads[1-9].*float16")
@thorough(EXHAUSTIVE, r"\[heads[1-9]-[15]-.*float16")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 1, 5, 64])
@pytest.mark.parametrize("heads", [(1, 1), (8, 2), (6, 6), (14, 2)])
def test_decode_attention(heads: tuple[int, int], window: int | None, dtype: torch.dtype, native: hal.Backend) -> None:
    """Test lengths around the chunk size, shuffled blocks, and batches smaller and larger than the thread count."""
    draw = Draw(dtype, seed=3)
    for lengths in ([1], [4, 0, 5], [3] * 9, [130, 1, 64, 63, 65, 0]):
        given = {"heads": heads, "head_dim": 32, "block_size": 16, "window": window}
        arguments = paged_sample(draw, [1] * len(lengths), lengths, **given)
        expected = ATTENTION.reference(*arguments)
        for kernel in (native.kernels["paged_attention"], by_torch.paged_attention):
            assert_agree(ATTENTION, dtype, kernel(*arguments), expected)


@thorough(DTYPE, r"\[heads[1-9].*float16")
@thorough(EXHAUSTIVE, r"\[heads[1-9]-(20|128)-.*float16")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [8, 20, 80, 128])
@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (5, 1), (7, 1), (16, 2), (6, 6)])
def test_mixed_steps(heads: tuple[int, int], head_dim: int, dtype: torch.dtype, native: hal.Backend) -> None:
    check_mixed_steps(native.kernels["paged_attention"], heads, head_dim, dtype)


def check_mixed_steps(kernel: Kernel, heads: tuple[int, int], head_dim: int, dtype: torch.dtype) -> None:
    """Sequences of one query, of few and of many, of none, and as many queries as sequences."""
    draw, many = Draw(dtype, seed=5), FEW // 96 + 1
    for counts, lengths in (
        ([1, 3, many, 0, 1, 5], [40, 3, 96, 7, 1, 70]),
        ([many, many], [many, 100]),
        ([2, 0, 1], [9, 4, 33]),
        ([4, 1], [64, 65]),
    ):
        for options in ({}, {"window": 6}, {"causal": False, "sinks": True}, {"softcap": 2.0, "sinks": True}):
            given = {"heads": heads, "head_dim": head_dim, "block_size": 16, **options}
            arguments = paged_sample(draw, counts, lengths, **given)
            expected = ATTENTION.reference(*arguments)
            found = torch.full(expected.shape, torch.nan, dtype=dtype)
            kernel(*arguments, out=found)
            assert_agree(ATTENTION, dtype, found, expected)


@thorough(DTYPE, r"\.float16\]")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "head_dim"), [((2, 2), 40), ((6, 2), 80)])
def test_long_prompts(heads: tuple[int, int], head_dim: int, dtype: torch.dtype, native: hal.Backend) -> None:
    check_long_prompts(native.kernels["paged_attention"], heads, head_dim, dtype)


@needs_pairs
@thorough(MODE)
def test_attention_by_tiles(emulated_tiles: ctypes.CDLL) -> None:
    kernel = AttentionKernels(emulated_tiles).paged_attention
    for heads, head_dim in (((2, 2), 40), ((6, 2), 80)):
        check_mixed_steps(kernel, heads, head_dim, torch.bfloat16)
        check_long_prompts(kernel, heads, head_dim, torch.bfloat16)
    check_what_is_not_finite_in_prompts(kernel, torch.bfloat16)


def check_long_prompts(kernel: Kernel, heads: tuple[int, int], head_dim: int, dtype: torch.dtype) -> None:
    """Longer than a tile of keys and a task's queries, also after a cached prefix; what is not theirs is NaN."""
    for options in ({}, {"window": 600}, {"causal": False}, {"causal": False, "window": 3}, {"softcap": 0.5}):
        given = {"heads": heads, "head_dim": head_dim, "block_size": 32, "sinks": "causal" not in options, **options}
        arguments = paged_sample(Draw(dtype, seed=9), [530, 1, 130], [530, 700, 1201], **given)
        expected = ATTENTION.reference(*arguments)
        assert_agree(ATTENTION, dtype, kernel(*arguments), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_prompt_does_not_see_what_is_not_finite_later(dtype: torch.dtype, native: hal.Backend) -> None:
    check_what_is_not_finite_in_prompts(native.kernels["paged_attention"], dtype)


def check_what_is_not_finite_in_prompts(kernel: Kernel, dtype: torch.dtype) -> None:
    """One key or value is not finite; tokens before it, and those whose window is after it, stay as they are."""
    draw, length = Draw(dtype, seed=11), 140
    query, caches = draw.normal(length, 2, 40), [draw.normal(10, 16, 1, 40) for _ in range(2)]
    table, starts = torch.arange(10, dtype=torch.int32)[None], torch.tensor([0, length], dtype=torch.int32)
    lens, positions = torch.tensor([length], dtype=torch.int32), torch.arange(length)
    for window, place, broken, part in itertools.product((None, 20), (45, 100), (torch.nan, torch.inf), range(2)):
        expected = ATTENTION.reference(*attended(query, caches, table, starts, lens, 0.2, window=window))
        given = [each.clone() for each in caches]
        given[part].view(-1, 40)[place, 39] = broken
        found = kernel(*attended(query, given, table, starts, lens, 0.2, window=window))
        sees = (positions >= place) & (positions < place + (window or length))
        assert_agree(ATTENTION, dtype, found[~sees], expected[~sees])
        assert not part or not found[sees].isfinite().all(-1).any()


def test_scores_of_any_sign_and_size(native: hal.Backend) -> None:
    """A tile of scores of -inf, between others; scales of 0 and below; a query that sees only -inf."""
    query, caches = torch.randn(600, 1, 16), [torch.randn(44, 32, 1, 16) for _ in range(2)]
    caches[0][16:35] = 0.0
    caches[0][16:35, :, :, 0] = torch.inf
    query[:, :, 0] = -query[:, :, 0].abs() - 0.1
    table, starts = torch.arange(44, dtype=torch.int32)[None], torch.tensor([0, 600], dtype=torch.int32)
    lens = torch.tensor([1408], dtype=torch.int32)
    for scale, window in ((0.3, None), (0.3, 40), (-0.2, None), (0.0, None)):
        arguments = attended(query, caches, table, starts, lens, scale, window=window)
        found = native.kernels["paged_attention"](*arguments)
        expected = ATTENTION.reference(*arguments)
        torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-5, atol=1e-5)
        assert bool(found.isfinite().all()) == (scale > 0 and window is None)


@pytest.mark.parametrize("queries", [2, FEW // 96 + 1])
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_broken_key_of_a_prompt_comes_out(broken: float, queries: int, native: hal.Backend) -> None:
    """Rows of other sequences stay as they are."""
    query, caches = torch.rand(queries + 1, 2, 16), [torch.randn(14, 16, 1, 16) for _ in range(2)]
    caches[0][6 + 6, 15] = broken  # the last key of the second sequence
    table, lens = torch.arange(14, dtype=torch.int32)[1:13].view(2, 6), torch.tensor([50, 96], dtype=torch.int32)
    starts = torch.tensor([0, 1, queries + 1], dtype=torch.int32)
    arguments = attended(query, caches, table, starts, lens, 0.3)
    found, expected = (
        native.kernels["paged_attention"](*arguments),
        ATTENTION.reference(*arguments),
    )
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert not found[-1].isfinite().all()
    assert found[:-1].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", [1, 15, 33, 4096, 9000])
def test_the_first_of_the_largest_logits_is_chosen(vocab_size: int, dtype: torch.dtype, native: hal.Backend) -> None:
    logits = Draw(dtype, seed=7).normal(40, vocab_size + 3)[:, 1:-2]
    logits[:8] = logits[:8].round()  # many ties
    logits[8] = float("-inf")
    logits[9, vocab_size // 2] = logits[9, -1] = float("inf")
    for row in range(10, 40):  # one tie, anywhere
        places = torch.randint(vocab_size, (2,), generator=torch.Generator().manual_seed(row))
        logits[row, places] = 9.0
    logits[20:30] -= 100
    expected = ops.operation("greedy_sample").reference(logits)
    for found in (native.kernels["greedy_sample"](logits), by_torch.greedy_sample(logits)):
        assert found.dtype is torch.int64
        assert torch.equal(found, expected)


@pytest.mark.parametrize("broken", [0, 20, 4999])
def test_a_logit_that_is_not_a_number_is_chosen(broken: int, native: hal.Backend) -> None:
    """So is it by argmax. A broken model then gives the same tokens with both sets of kernels."""
    logits = torch.rand(1, 5000)
    logits[0, broken] = torch.nan
    assert native.kernels["greedy_sample"](logits).tolist() == by_torch.greedy_sample(logits).tolist() == [broken]


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_comes_out(broken: float, native: hal.Backend) -> None:
    x, weight = torch.ones(3, 64), torch.ones(64)
    x[1, 5] = broken
    normed = native.kernels["rms_norm"](x, weight, 1e-6)
    torch.testing.assert_close(normed, ops.operation("rms_norm").reference(x, weight, 1e-6), equal_nan=True)
    activated = native.kernels["silu_and_mul"](x)
    torch.testing.assert_close(activated, ops.operation("silu_and_mul").reference(x), equal_nan=True)
    assert not activated[1].isfinite().all()
    keys, table = torch.randn(2, 8, 1, 16), torch.tensor([[1]], dtype=torch.int32)
    starts, lens = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([6], dtype=torch.int32)
    values = keys.clone()
    values[1, 3] = broken
    values[1, 7] = broken  # Beyond the length: must not be read.
    for value in (values, values.nan_to_num(1.0, 1.0, 1.0)):
        arguments = attended(torch.randn(1, 1, 16), (keys, value), table, starts, lens, 1.0)
        found = native.kernels["paged_attention"](*arguments)
        assert bool(found.isfinite().all()) == (value is not values)


def test_bad_slots_and_blocks_are_refused(native: hal.Backend) -> None:
    cache, row = torch.zeros(2, 4, 1, 8), torch.ones(1, 1, 8)
    for slot in (8, -1):
        with pytest.raises(OperationError, match=f"slot {slot}, outside the cache of 8 slots"):
            native.kernels["store_kv_cache"](row, row, cache, cache.clone(), torch.tensor([slot], dtype=torch.int32))
    starts = torch.tensor([0, 1], dtype=torch.int32)
    for block, length in ((2, 3), (-1, 3), (1, 5), (1, -1), (1, -4)):
        table, lens = torch.tensor([[block]], dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
        with pytest.raises(OperationError, match=f"sequence 0 has {length} tokens in the blocks"):
            native.kernels["paged_attention"](*attended(row, (cache, cache), table, starts, lens, 1.0))
    starts, row = torch.tensor([0, 2], dtype=torch.int32), torch.ones(2, 1, 8)  # A prefill, which torch computes.
    for blocks, length in (([1, 2], 7), ([0, 2], 6), ([-1, 0], 6), ([0], 5), ([1, -1], 7), ([], 2), ([0, 1], -1)):
        table, lens = torch.tensor([blocks], dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
        with pytest.raises(OperationError, match=f"sequence 0 has {length} tokens in the blocks"):
            native.kernels["paged_attention"](*attended(row, (cache, cache), table, starts, lens, 1.0))
    with pytest.raises(OperationError, match="rms_norm was given float32"):
        native.kernels["rms_norm"](torch.ones(2, 8), torch.ones(4), 1e-6)
    with pytest.raises(OperationError, match="rms_norm was given float32"):
        native.kernels["rms_norm"](torch.ones(2, 8), torch.ones(8, dtype=torch.bfloat16), 1e-6)


def test_what_does_not_fit_is_refused(native: hal.Backend) -> None:
    """Invalid arguments raise; the C++ code would read out of bounds."""
    kernels, ones = native.kernels, torch.ones
    cache, row = torch.zeros(2, 4, 1, 8), ones(3, 1, 8)
    table, starts, lens = ones(3, 1).int(), torch.arange(4).int(), ones(3).int()
    attention = (row, cache, cache, table, starts, lens)
    x, gate_up, down, pairs = ones(3, 8), ones(4, 10, 8), ones(4, 8, 5), torch.zeros(3, 2, dtype=torch.int32)
    plain = None, None, GatedActivation()
    y, slots = ones(3, 8), torch.tensor([0, 1, -1]).int()
    lora_a, lora_b = ones(2, 1, 2, 4), ones(2, 2, 8)
    calls = {
        "add_lora": [
            (y, ones(3, 5), lora_a, lora_b, slots, "0:8"),
            (y, ones(2, 4), lora_a, lora_b, slots, "0:8"),
            (y, ones(3, 4), lora_a, lora_b[:, :, :7], slots, "0:8"),
            (y, ones(3, 4), lora_a, lora_b, slots[:2], "0:8"),
            (y, ones(3, 4), lora_a, lora_b, slots + 1, "0:8"),
            (y, ones(3, 4), lora_a, lora_b, slots - 1, "0:8"),
            (y, ones(3, 4), lora_a, lora_b, slots, "0:7"),
            (y, ones(3, 4), lora_a, lora_b, slots, "0:4 1:4"),
            (y, ones(3, 4), lora_a, lora_b, slots, "0:9 0:-1"),
            (y, ones(3, 4), lora_a.half(), lora_b, slots, "0:8"),
            (y, ones(3, 4, device="meta"), lora_a, lora_b, slots, "0:8"),
        ],
        "topk_route": [
            (ones(3, 4), None, 5, False, True, 1.0, 1, 1, 1),
            (ones(3, 4), None, 3, False, True, 1.0, 2, 1, 1),
            (ones(3, 4), None, 1, False, True, 1.0, 3, 1, 1),
            (ones(3, 4), ones(3), 2, True, True, 1.0, 1, 1, 1),
        ],
        "expert_permute": [(x, pairs[:2], 4), (x, pairs.flatten(), 4)],
        "expert_unpermute": [(ones(6, 8), pairs.flatten()[:5], ones(3, 2)), (ones(5, 8), pairs.flatten(), ones(3, 2))],
        "grouped_linear": [
            (x, ones(4, 10, 7), torch.tensor([3, 0, 0, 0]), *[None] * 5, FLOAT),
            (x, gate_up, torch.tensor([3, 0, 0]), *[None] * 5, FLOAT),
            (x, gate_up.half(), torch.tensor([3, 0, 0, 0]), *[None] * 5, FLOAT),
        ],
        "expert_mlp": [
            (x, gate_up[:3], down, ones(3, 2), pairs, *plain),
            (x, gate_up, down[:, :, :4], ones(3, 2), pairs, *plain),
            (x, gate_up, down, ones(3, 1), pairs, *plain),
            (x, gate_up, down, ones(2, 2), pairs[:2], *plain),
            (x, gate_up, down.half(), ones(3, 2), pairs, *plain),
        ],
        "rms_norm": [(ones(2, 8).double(), ones(8).double(), 1e-6), (ones(2, 8, device="meta"), ones(8), 1e-6)],
        "gelu_and_mul": [(ones(2, 7), "tanh"), (ones(2, 8, device="meta"), "none"), (ones(2, 8), "erf")],
        "silu_and_mul": [(ones(2, 7),), (ones(2, 8, device="meta"),)],
        "dynamic_quantize": [(ones(2, 8).double(),), (ones(2, 8, device="meta"),)],
        "quantize": [
            (ones(2, 8).double(), ones(1), None),
            (ones(2, 8), ones(1).double(), None),
            (ones(2, 8), ones(1, device="meta"), None),
            (ones(2, 8), ones(1), ones(2).int()),
            (ones(2, 8), ones(1), ones(1, device="meta").int()),
        ],
        "mask_logits": [
            (ones(2, 40), ones(2, 1).int()),
            (ones(2, 32), ones(2, 2).int()),
            (ones(2, 32), ones(1, 1).int()),
            (ones(2, 32), ones(2, 1).long()),
            (ones(32), ones(1).int()),
            (ones(2, 32).double(), ones(2, 1).int()),
            (ones(2, 32), ones(2, 1, device="meta").int()),
        ],
        "penalize": [
            (ones(2, 8), ones(2, 7).int(), ones(2, 8).bool(), ones(2), ones(2), ones(2)),
            (ones(2, 8), ones(2, 8).int(), ones(1, 8).bool(), ones(2), ones(2), ones(2)),
            (ones(2, 8), ones(2, 8).long(), ones(2, 8).bool(), ones(2), ones(2), ones(2)),
            (ones(2, 8), ones(2, 8).int(), ones(2, 8).int(), ones(2), ones(2), ones(2)),
            (ones(2, 8), ones(2, 8).int(), ones(2, 8).bool(), ones(2), ones(1), ones(2)),
            (ones(2, 8), ones(2, 8).int(), ones(2, 8).bool(), ones(2), ones(2), ones(2).double()),
            (ones(2, 8), ones(2, 8).int(), ones(2, 8).bool(), ones(2), ones(2), ones(2, device="meta")),
        ],
        "greedy_sample": [(ones(2, 0),), (ones(8),), (ones(2, 8).int(),), (ones(2, 8, device="meta"),)],
        "add_rms_norm": [(ones(2, 8), ones(3, 8), ones(8), 1e-6)],
        "rotary_embedding": [(ones(3, 2, 8), ones(2, 2, 8), ones(3, 8), ones(3, 8))],
        "store_kv_cache": [(row, row, cache, cache, ones(2).int()), (row, row, cache, ones(2, 4, 2, 8), lens)],
        "paged_attention": [
            (*attention, starts, lens[:2], None, AttentionOptions(1.0)),
            (*attention, starts[:3], lens, None, AttentionOptions(1.0)),
            (*attention, starts, (lens.long() + 2**32), None, AttentionOptions(1.0)),
        ],
    }
    columns = list(next(iter(ops.operation("sample").samples(Draw()))))
    calls["sample"] = [(*columns[:at], columns[at].double(), *columns[at + 1 :]) for at in range(7)]
    calls["sample"] += [(*columns[:at], columns[at][:0], *columns[at + 1 :]) for at in range(7)]
    calls["sample"] += [(columns[0][:, :0], *columns[1:]), (columns[0][0], *columns[1:])]
    of_caches = "latent_attention", "quantized_paged_attention", "store_quantized_kv_cache"
    together = *LATENT_KERNELS, *RECURRENT_KERNELS, *SELECTION_KERNELS, *STREAM_KERNELS
    for name in (*together, "packed_attention", *of_caches):
        first, *others = next(iter(ops.operation(name).samples(Draw())))
        calls[name] = [(first.double(), *others)]
    rule = next(iter(ops.operation("gated_delta_rule").samples(Draw())))
    calls["gated_delta_rule"] += [(*rule[:5], rule[5].to(dtype), *rule[6:]) for dtype in (torch.float64, torch.float16)]
    assert set(calls) == set(NATIVE) - TORCHS
    for name, each in calls.items():
        for arguments in each:
            with pytest.raises(OperationError):
                kernels[name](*arguments)


def test_any_layout_of_queries_will_do(native: hal.Backend) -> None:
    query, caches = torch.randn(2, 32, 4).transpose(1, 2), [torch.randn(3, 8, 2, 32) for _ in range(2)]
    table, starts = torch.tensor([[1], [2]]), torch.arange(3)  # int64 too
    lens = torch.tensor([5, 8])
    arguments = attended(query, caches, table, starts, lens, 0.2)
    expected = ATTENTION.reference(*arguments)
    torch.testing.assert_close(native.kernels["paged_attention"](*arguments), expected)


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("no such flag", "set CXX to another compiler"),
        ("clang: error: unsupported option '-fopenmp'", "brew install gcc"),
        ("fatal error: 'omp.h' file not found", "brew install gcc"),
    ],
)
def test_a_compiler_that_fails(said: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken"
    broken.write_text(f'#!/bin/sh\necho "{said}" >&2\nexit 1\n')
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("HAL_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(DriverUnavailable, match=rf"failed:\n{said}\n.*{remedy}"):
        build.load.__wrapped__()
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HAL_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(DriverUnavailable, match="cannot be stored in") as caught:
        build.load.__wrapped__()
    assert "HAL_CACHE_DIR" in str(caught.value)


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a cache that has the compiled kernels."""
    monkeypatch.delenv("CXX", raising=False)
    entry = Path(build.load.__wrapped__()._name).parent
    shutil.copytree(entry, tmp_path / "cpu" / entry.name)
    monkeypatch.setenv("HAL_CACHE_DIR", str(tmp_path))
    return tmp_path / "cpu"


def test_a_damaged_library_is_compiled_again(
    compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The compiler copies what another has compiled, which takes no half minute."""
    (real,) = compiled.glob("*/kernels.so")
    copying = tmp_path / "copying"
    copying.write_text(f'#!/bin/sh\nfor last; do :; done\nexec cp {real} "$last"\n')
    copying.chmod(0o755)
    monkeypatch.setenv("CXX", str(copying))
    monkeypatch.setenv("HAL_CACHE_DIR", str(tmp_path / "own"))
    build.load.__wrapped__()
    (library,) = tmp_path.glob("own/cpu/*/kernels.so")
    library.unlink()  # what is loaded stays
    library.write_bytes(b"")
    assert build.load.__wrapped__().rms_norm
    assert f"{library} is damaged" in caplog.text


@thorough(PROCESSES, r"\[XDG")
@pytest.mark.parametrize("variable", ["HAL_CACHE_DIR", "XDG_CACHE_HOME"])
def test_without_a_home_folder_torchs_kernels_run(variable: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("HAL_CACHE_DIR", "XDG_CACHE_HOME")}
    environment[variable] = "~no-such-user/cache"

    program = "import hal; print(hal.open('cpu')); hal.open({'backend': 'cpu', 'options': {'native': True}})"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, cwd=tmp_path, check=False
    )
    assert "cpu" in ran.stdout, ran.stderr
    assert "runs without its C++ kernels" in ran.stderr
    assert "a home folder that does not exist" in ran.stderr
    assert "DriverUnavailable" in ran.stderr
    assert "set HAL_CACHE_DIR to a writable folder" in ran.stderr
    assert not list(tmp_path.iterdir())


class TestTrust:
    """Code that another user could have written is not loaded."""

    @pytest.fixture
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """Return the cache's folder. The compiler is replaced with one that writes an empty library."""
        fast = tmp_path / "fast"
        fast.write_text('#!/bin/sh\nfor last; do :; done\nexec g++ -shared -x c++ /dev/null -o "$last"\n')
        fast.chmod(0o755)
        monkeypatch.setenv("CXX", str(fast))
        monkeypatch.setenv("HAL_CACHE_DIR", str(tmp_path / "cache"))
        return tmp_path / "cache" / "cpu"

    @staticmethod
    def library(folder: Path) -> Path:
        (found,) = folder.glob("*/kernels.so")
        return found

    def test_a_library_is_its_users_own(self, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        build.load.__wrapped__()
        library = self.library(folder)
        files = (folder, library.parent, library)
        assert [stat.S_IMODE(each.stat().st_mode) for each in files] == [0o700, 0o700, 0o700]
        made = library.stat().st_ino
        build.load.__wrapped__()
        assert library.stat().st_ino == made
        assert [each.levelname for each in caplog.records] == ["INFO"], "compiled once, without a warning"

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root may change the owner of a file")
    @pytest.mark.parametrize("given", ["folder", "library"])
    def test_what_is_anothers_is_not_loaded(self, given: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        build.load.__wrapped__()
        library = self.library(folder)
        library.unlink()
        library.write_bytes(b"no library")
        os.chown(folder if given == "folder" else library, 12345, 12345)
        assert build.load.__wrapped__()
        if given == "folder":
            assert f"the cache folder {folder} belongs to user" in caplog.text
            assert "are compiled at each start; set HAL_CACHE_DIR to a folder that belongs to you" in caplog.text
            assert library.read_bytes() == b"no library"
        else:
            assert "hal recreates it" in caplog.text
            assert self.library(folder).stat().st_uid == 0


def test_what_is_compiled_needs_no_compiler(compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.load.__wrapped__().rms_norm


def test_a_chosen_compiler_is_the_one_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAL_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    with pytest.raises(DriverUnavailable, match=r"there is no no-such-compiler on the PATH\n.*install g\+\+"):
        build.load.__wrapped__()
    monkeypatch.setenv("CXX", "g++ -DCHOSEN")
    assert compiler() == [shutil.which("g++"), "-DCHOSEN"]


class TestPacking:
    @pytest.fixture(autouse=True)
    def small_weights_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(packing, "MIN_BYTES", 1)
        monkeypatch.setattr(packing, "_measured", {})

    @pytest.fixture(params=filter(capabilities.packs, DTYPES), ids=str)
    def weight(self, request: pytest.FixtureRequest) -> Tensor:
        return torch.randn(96, 64, dtype=request.param)

    @staticmethod
    def gains(monkeypatch: pytest.MonkeyPatch, *gains: float) -> Packing:
        """Return a packing that measures these gains."""
        monkeypatch.setattr(packing, "measure", lambda weight, sizes, kernel: Measured(list(gains)))
        return Packing()

    @pytest.mark.parametrize("rows", [0, 1, 5, 40])
    def test_it_computes_the_same(self, rows: int, weight: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
        packed = self.gains(monkeypatch, 2.0, 2.0, 2.0).prepare(weight, shared=False)
        assert packed.is_mkldnn
        assert packed.shape == weight.shape
        x, bias = torch.randn(rows, 64, dtype=weight.dtype), torch.randn(96, dtype=weight.dtype)
        for each in (None, bias, torch.randn(192, dtype=weight.dtype)[::2]):
            torch.testing.assert_close(linear(x, packed, each), linear(x, weight, each))

    def test_weights_of_a_packages_kernel_stay(self, weight: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(packing, "measure", lambda weight, sizes, kernel: Measured([2.0, 2.0, 2.0]))
        backend, given = open_cpu(native=False), {"weight": weight}
        use = WeightUse("linear", weight.dtype, FLOAT)
        assert backend.prepare_weights(given, use)["weight"].is_mkldnn
        added = AddedKernel("cpu", "linear", FLOAT.__eq__, linear).before(backend.kernels["linear"])
        backend.kernels = {**backend.kernels, "linear": added}
        assert backend.prepare_weights(given, use) is given

    def test_it_can_be_unpacked(self, weight: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
        packed = self.gains(monkeypatch, 2.0, 2.0, 2.0).prepare(weight, shared=False)
        backend = open_cpu(native=False)
        assert torch.equal(backend.plain_weight(packed), weight)
        assert backend.plain_weight(weight) is weight

    def test_a_table_keeps_both_forms(self, weight: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
        """The packed weight is used up to 8 rows, where it is faster, and the unpacked one above."""
        packed = self.gains(monkeypatch, 1.5, 1.2, 0.7).prepare(weight, shared=True)
        used = []
        monkeypatch.setattr(packing, "_packed_linear", lambda x, *rest: used.append(x.shape[0]))
        for rows in (1, 8, 9, 32):
            linear(torch.randn(rows, 64, dtype=weight.dtype), packed)
        assert used == [1, 8]

    def test_each_shape_is_measured_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        measured: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

        def gains(weight: Tensor, sizes: tuple[int, ...], kernel: object) -> Measured:
            measured.append((tuple(weight.shape), sizes))
            return Measured([2.0] * len(sizes))

        monkeypatch.setattr(packing, "measure", gains)
        prepares = Packing()
        for shape in ((8, 16), (8, 16), (16, 8), (8, 16)):
            prepares.prepare(torch.randn(shape), shared=False)
        prepares.prepare(torch.randn(8, 16), shared=False, sizes=[1, 2, 4, 8, 16])
        assert measured == [((8, 16), ROWS), ((16, 8), ROWS), ((8, 16), (1, 4, 16))]

    @pytest.mark.parametrize(
        "compilation", [{"capture_sizes": [5, 2]}, {"compiler": "graph", "decode": {"capture_sizes": [5, 2]}}]
    )
    def test_the_batch_sizes_of_the_config_are_measured(
        self, compilation: dict[str, Any], trained: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen = set()
        monkeypatch.setattr(packing, "measure", lambda weight, sizes, kernel: seen.add(sizes) or Measured([1.0, 1.0]))
        backend = hal.open({"backend": "cpu", "compilation": compilation})
        hal.load_model(trained, backend)
        assert seen == {(2, 5)}

    @pytest.mark.parametrize("faster", [1, 3])
    def test_a_gain_is_what_packing_saves(self, faster: int, monkeypatch: pytest.MonkeyPatch) -> None:
        def seconds(weights: list[Tensor], product: object, x: Tensor) -> float:
            return x.shape[0] * (2.0 if weights[0].is_mkldnn else 2.0 * faster)

        monkeypatch.setattr(packing, "_run", seconds)
        assert packing.measure(torch.randn(512, 256), (1, 8)) == Measured([faster, faster])

    def test_few_rows_are_for_the_faster_kernel(self, native: hal.Backend, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is faster up to 8 rows packed, and never plain, so that packing gains most for few rows."""
        if not capabilities.packs(torch.bfloat16):
            pytest.skip("on this processor the driver keeps bfloat16 weights plain, as test_few_rows.py tests")

        def seconds(weights: list[Tensor], product: object, x: Tensor) -> float:
            rows, in_blocks = x.shape[0], weights[0].is_mkldnn
            by_torch = 4.0 if in_blocks else 6.0
            return by_torch if product is linear else rows / 4 if in_blocks else 7.0

        monkeypatch.setattr(packing, "_run", seconds)
        kernel = native.kernels["linear"].taking(FLOAT).__self__
        weight = torch.randn(96, 64).bfloat16()
        found = packing.measure(weight, (1, 32), kernel)
        assert found == Measured([24.0, 1.5], few_packed=8)
        prepared = Packing(kernel=kernel).prepare(weight, shared=False, sizes=(1, 32))
        assert kernel.few.pop(Layout.of(prepared)).most == 8

    def test_what_is_measured_is_kept(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Not for other settings of torch's libraries, nor where nothing can be kept."""
        monkeypatch.setenv("HAL_CACHE_DIR", str(tmp_path))
        numbers = iter(range(9))

        def found(key: str = "a") -> int:
            return packing.kept(key, lambda: Measured([0.0], few_packed=next(numbers))).few_packed

        assert (found(), found(), found("b")) == (0, 0, 1)
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", f"not {os.environ.get('ONEDNN_MAX_CPU_ISA')}")
        assert (found(), found()) == (2, 2)
        (tmp_path / "file").touch()
        monkeypatch.setenv("HAL_CACHE_DIR", str(tmp_path / "file"))
        assert (found(), found()) == (3, 4)

    def test_it_is_measured_for_real(self, native: hal.Backend) -> None:
        for dtype in DTYPES:
            kernel = native.kernels["linear"].taking(FLOAT).__self__
            found = packing.measure(torch.randn(512, 256).to(dtype), (1, 8), kernel)
            assert len(found.speedups) == 2
            assert all(gain >= 0 for gain in found.speedups)

    def test_small_weights_are_left_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(packing, "MIN_BYTES", 1 << 16)
        monkeypatch.setattr(packing, "measure", lambda weight, sizes, kernel: Measured([2.0] * len(sizes)))
        small, large = torch.randn(64, 255), torch.randn(64, 256)
        assert Packing().prepare(small, shared=False) is small
        assert Packing().prepare(large, shared=False).is_mkldnn

    def test_what_one_dnn_does_not_pack_is_left_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It packs float32 on every processor, and bfloat16 on some."""
        plain = [dtype for dtype in DTYPES if not capabilities.packs(dtype)]
        assert {*plain} in ({torch.float16}, {torch.float16, torch.bfloat16})
        for dtype in plain:
            weight = torch.randn(8, 8, dtype=dtype)
            assert self.gains(monkeypatch, 2.0, 2.0, 2.0).prepare(weight, shared=False) is weight

    @thorough(EXHAUSTIVE, r"\[inductor")
    @pytest.mark.parametrize("compiler", ["eager", "graph", "inductor"])
    def test_a_model_gives_the_same_tokens(
        self, compiler: str, trained: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        texts, params = prompts(trained), hal.SamplingParams(max_new_tokens=12)

        def tokens(*gains: float) -> list[tuple[int, int]]:
            monkeypatch.setattr(packing, "measure", lambda weight, sizes, kernel: Measured(list(gains)))
            packing._measured.clear()
            compilation = {"compiler": compiler, "capture_sizes": [2, 4, 8]}
            backend = hal.open({"backend": "cpu", "dtype": "float32", "compilation": compilation})
            runner = hal.Runner(hal.load_model(trained, backend), backend)
            assert any(each.is_mkldnn for each in runner.model.parameters()) == (gains[-1] > 1)
            return [(each.prompt_index, each.token_id) for each in hal.generate(runner, texts, params)]

        with caplog.at_level(logging.INFO):
            assert tokens(2.0, 2.0, 2.0) == tokens(0.5, 0.5, 0.5) == tokens(1.1, 0.9, 0.5)
        assert "held twice" in caplog.text

    def test_the_debug_mode_knows_packed_weights(self, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """They have no address that torch shows. A replaced one is found, one that was written into is not."""
        monkeypatch.setattr(packing, "measure", lambda weight, sizes, kernel: Measured([2.0] * len(sizes)))
        monkeypatch.setattr(packing, "_measured", {})
        compilation = {"compiler": "graph", "capture_sizes": [2, 4, 8], "debug": True}
        backend = hal.open({"backend": "cpu", "dtype": "float32", "compilation": compilation})
        runner = hal.Runner(hal.load_model(trained, backend), backend)
        texts, params = prompts(trained), hal.SamplingParams(max_new_tokens=4)
        before = [each.token_id for each in hal.generate(runner, texts, params)]
        name, weight = next(each for each in runner.model.named_parameters() if each[1].is_mkldnn)
        with torch.no_grad():
            weight.copy_(packing.packed(weight.to_dense()))
        assert [each.token_id for each in hal.generate(runner, texts, params)] == before
        module, _, attribute = name.rpartition(".")
        replaced = torch.nn.Parameter(packing.packed(weight.to_dense()), requires_grad=False)
        setattr(runner.model.get_submodule(module), attribute, replaced)
        with pytest.raises(GraphError, match=f"{re.escape(name)} has another address"):
            list(hal.generate(runner, texts, params))
