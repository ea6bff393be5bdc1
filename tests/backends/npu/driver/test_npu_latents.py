"""Tests for latent and sparse attention on the NPU: values, launches, graphs and the restrictions of the operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from helpers import TESTS, published_configs
from helpers.kernel_checks import check_kernel
from helpers.npu import latent_launches
from helpers.npu.drawn import attention_arguments
from helpers.thorough import EXHAUSTIVE, FAMILY, thorough

import hal
from hal import ops
from hal.cli import main
from hal.ops import AttentionOptions, Draw, Sample
from hal.ops.tolerance import assert_agree

DOCS = TESTS.parent / "docs"
DTYPES = (torch.float16, torch.bfloat16)
RANK, ROPE_DIM = 512, 64
LATENT, SELECT, ATTEND, BOTH = map(
    ops.operation, ("latent_attention", "select_keys", "attend_selected", "select_and_attend")
)

Opened = Callable[..., hal.Backend]


def latents(
    draw: Draw,
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    heads: int = 4,
    rope_dim: int = ROPE_DIM,
    **given: int,
) -> Sample:
    """Return arguments of latent attention; slots that no token owns hold NaN."""
    query, cache, _, *lengths, _, options = attention_arguments(
        draw, query_lens, kv_lens, heads=heads, kv_heads=1, head_dim=RANK + rope_dim, **given
    )
    sizes = [RANK, rope_dim]
    caches = (each.contiguous() for each in cache.squeeze(2).split(sizes, -1))
    return *query.split(sizes, -1), *caches, *lengths, options


class TestLatentAttention:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize(
        ("query_lens", "kv_lens", "version"),
        [
            ([1, 1, 1], [200, 1, 129], 3),
            ([1, 1, 1], [20, 0, 0], 3),  # padding rows
            ([3, 1, 4], [200, 1, 129], 4),
            ([16, 0], [16, 40], 4),
            ([17, 2, 1], [17, 300, 60], 4),  # a prompt, a chunk of one, and a decode
        ],
        ids=str,
    )
    def test_values_and_launches(
        self, npu: Opened, dtype: torch.dtype, query_lens: list[int], kv_lens: list[int], version: int
    ) -> None:
        backend = npu()
        for heads in (16, 3):
            sample = latents(Draw(dtype, "npu", heads), query_lens, kv_lens, heads)
            with backend.counting_launches() as found:
                check_kernel(LATENT, dtype, backend.ops.latent_attention, sample)
            assert {name: count for name, count in found.items() if name.startswith("FusedInfer")} == {
                f"FusedInferAttentionScoreV{version}": 1
            }

    @pytest.mark.parametrize("queries", [1, 2])
    def test_sizes_and_options_that_the_operator_lacks(self, npu: Opened, queries: int) -> None:
        backend, draw = npu(), Draw(torch.float16, "npu")
        plain = latents(draw, [queries, queries], [90, 130])
        calls = [
            latents(draw, [queries, queries], [90, 130], rope_dim=32),
            (*plain[:-1], AttentionOptions(0.1, window=40)),
            (*plain[:-1], AttentionOptions(0.1, softcap=20.0)),
        ]
        for sample in calls:
            with backend.counting_launches() as found:
                check_kernel(LATENT, torch.float16, backend.ops.latent_attention, sample)
            assert not any(name.startswith("FusedInfer") for name in found)

    @pytest.mark.parametrize("queries", [1, 2])
    def test_a_capture_updates_the_lengths(self, npu: Opened, queries: int) -> None:
        backend = npu()
        *tensors, starts, lens, options = latents(Draw(torch.bfloat16, "npu"), [queries] * 3, [200, 2, 129])
        for cache in tensors[2:4]:
            cache.nan_to_num_()
        graph = backend.graph()
        output = graph.capture(lambda: backend.ops.latent_attention(*tensors, starts, lens, options))
        for new in ([200, 2, 129], [3, 90, 0], [129, 2, 200]):
            given = torch.tensor(new, dtype=torch.int32)
            tensors[6].copy_(given)
            graph.replay(query_start_loc_host=starts, kv_lens_host=given)
            on_cpu = (each.cpu() for each in tensors)
            expected = LATENT.reference(*on_cpu, starts, given, options)
            assert_agree(LATENT, torch.bfloat16, output, expected)


def selections(draw: Draw, query_lens: Sequence[int], kv_lens: Sequence[int], budget: int, heads: int = 16) -> Sample:
    """Return arguments of select_and_attend; slots that no token owns hold NaN."""
    query, rope, latent_cache, rope_cache, table, starts, lens, *_ = latents(draw, query_lens, kv_lens, heads)
    tokens, block_size = sum(query_lens), latent_cache.shape[1]
    index = draw.normal(tokens, 8, 128), draw.normal(tokens, 8), draw.normal(len(latent_cache), block_size, 128)
    return *index, query, rope, latent_cache, rope_cache, table, starts, lens, budget, (RANK + ROPE_DIM) ** -0.5, 1


def margins(sample: Sample) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the positions that the reference selects, all scores in float32, and each token's least selected one."""
    on_cpu = [each.cpu() if isinstance(each, torch.Tensor) else each for each in sample]
    query, weights, cache, *_, table, starts, lens, budget, _, _ = on_cpu
    chosen = SELECT.reference(query, weights, cache, table, starts, lens, budget)
    owner = torch.searchsorted(starts[1:].long(), torch.arange(len(query)), right=True)
    keys = cache[table.long()].flatten(1, 2)[owner].float()
    scores = (weights.float().unsqueeze(1) @ torch.relu(query.float() @ keys.transpose(1, 2))).squeeze(1)
    found = scores.gather(1, chosen.long().clamp(min=0)).masked_fill(chosen < 0, float("inf"))
    return chosen, scores, found.amin(1)


class TestSelection:
    CASES = (
        ([1, 1, 1], [300, 0, 129], 64),  # decode, with a padding row
        ([5, 1, 20], [21, 130, 20], 7),  # prompts, and after a cached prefix
        ([2, 2], [90, 40], 2048),  # a budget for all
    )

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize(("query_lens", "kv_lens", "budget"), CASES, ids=str)
    def test_the_set_of_positions(
        self, npu: Opened, dtype: torch.dtype, query_lens: list[int], kv_lens: list[int], budget: int
    ) -> None:
        """It is that of the reference, where scores differ by more than rounding: sums of 16-bit products."""
        backend, sample = npu(), selections(Draw(dtype, "npu"), query_lens, kv_lens, budget)
        with torch.inference_mode(), backend.counting_launches() as launched:
            found = backend.ops.select_keys(*sample[:3], *sample[7:11]).cpu()
        assert launched["LightningIndexer"] == 1
        chosen, scores, least = margins(sample)
        assert found.shape == chosen.shape
        for token, (own, expected) in enumerate(zip(found.tolist(), chosen.tolist(), strict=True)):
            kept = [each for each in own if each >= 0]
            assert own == sorted(kept) + [-1] * (len(own) - len(kept))
            for position in set(kept) ^ set(expected) - {-1}:
                assert abs(scores[token, position] - least[token]) <= 1e-4 * scores[token].abs().amax()

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize(("query_lens", "kv_lens", "budget"), CASES, ids=str)
    def test_attention_to_them(
        self, npu: Opened, dtype: torch.dtype, query_lens: list[int], kv_lens: list[int], budget: int
    ) -> None:
        backend, sample = npu(), selections(Draw(dtype, "npu"), query_lens, kv_lens, budget)
        chosen, _, _ = margins(sample)
        attending = (*sample[3:7], chosen.to("npu"), *sample[7:9], sample[-2])
        with backend.counting_launches() as launched:
            check_kernel(ATTEND, dtype, backend.ops.attend_selected, attending)
        assert launched["SparseFlashAttention"] == 1
        with backend.counting_launches() as launched:
            check_kernel(BOTH, dtype, backend.ops.select_and_attend, sample)
        assert launched["LightningIndexer"] == launched["SparseFlashAttention"] == 1
        assert not launched["Sort"]

    def test_rows_of_no_sequence(self, npu: Opened) -> None:
        backend = npu()
        *index, query, rope, latent_cache, rope_cache, table, starts, lens, budget, scale, group = selections(
            Draw(torch.bfloat16, "npu"), [3, 2], [40, 50], 16
        )
        starts[-1] = 3
        sample = (*index, query, rope, latent_cache, rope_cache, table, starts, lens, budget, scale, group)
        check_kernel(SELECT, torch.bfloat16, backend.ops.select_keys, (*index, table, starts, lens, budget, 1))
        check_kernel(BOTH, torch.bfloat16, backend.ops.select_and_attend, sample)

    @pytest.mark.parametrize("heads", [3, 16])
    def test_where_the_operators_do_not_apply(self, npu: Opened, heads: int) -> None:
        backend, sample = npu(), list(selections(Draw(torch.float16, "npu"), [2, 1], [90, 40], 16, heads))
        if heads == 16:
            sample[0], sample[2] = sample[0][..., :64], sample[2][..., :64].contiguous()
        with backend.counting_launches() as launched:
            check_kernel(BOTH, torch.float16, backend.ops.select_and_attend, tuple(sample))
        assert launched["LightningIndexer"] == (heads == 3)
        assert launched["SparseFlashAttention"] == (heads == 16)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"index_topk": 2500},
            "npu_lightning_indexer does not take index keys of 16 elements, the budget 2500; "
            "npu_sparse_flash_attention does not take latents of 32 elements, rotary rows of 8 elements",
        ),
        (
            {**latent_launches.LATENTS, **latent_launches.INDEX, "num_attention_heads": 12, "num_key_value_heads": 12},
            "npu_sparse_flash_attention does not take 12 heads",
        ),
    ],
    ids=["sizes", "heads"],
)
def test_explain_names_what_the_operators_do_not_take(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    path = published_configs.write(tmp_path / "model", "DeepSeek-V3.2", **changes)
    result = CliRunner().invoke(main, ["explain", str(path), "--backend", "npu", "--compiler", "graph"])
    assert f"3 x {reason}\n" in result.stdout


def test_explain_names_the_sizes_of_latents_that_are_composed(tmp_path: Path) -> None:
    path = published_configs.write(tmp_path / "model", "DeepSeek-V3", kv_lora_rank=512)
    result = CliRunner().invoke(main, ["explain", str(path), "--backend", "npu", "--compiler", "graph"])
    found = (
        "3 calls of latent_attention run another kernel: the driver's kernel does not support rotary rows of 8 elements"
    )
    assert found in result.stdout


@thorough(FAMILY, r"\[(?!DeepSeek-V3.2)")
@thorough(EXHAUSTIVE, r"\[(?!DeepSeek-V3\.2|GLM-5\.2 with an)")
@pytest.mark.parametrize("label", latent_launches.ROWS)
def test_the_page_has_the_launches_of_a_layer(label: str, tmp_path: Path) -> None:
    row = latent_launches.row(tmp_path, label)
    assert f"\n{row}" in (DOCS / "reference" / "npu-launches.md").read_text(encoding="utf-8")


@thorough(EXHAUSTIVE, r"\[torch\.float16")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_model_that_selects_fewer_tokens_than_it_has(dtype: torch.dtype, tmp_path: Path) -> None:
    """The NPU's logits differ from float32 no more than twice as much as the CPU's in the same dtype, on the whole."""
    length, name = latent_launches.INDEX["index_topk"] + 20, str(dtype).removeprefix("torch.")
    draw = torch.Generator().manual_seed(7)
    prompts = torch.randint(2, 96, (2, length), generator=draw).tolist()
    found = []
    for number, (backend, given) in enumerate((("cpu", "float32"), ("cpu", name), ("npu", name))):
        compiler = "graph" if backend == "npu" else "eager"
        running = latent_launches.runner(
            tmp_path / str(number), "DeepSeek-V3.2", backend, compiler, given, 2, num_attention_heads=16
        )
        blocks = [[1, 2], [3, 4]]
        rows = [running.step(running.batch(prompts, blocks)).logits]
        rows += [running.step(running.batch([[5], [9]], blocks, cached=[length] * 2)).logits]
        found.append(torch.cat(rows).float().cpu())
    exact, cpu, npu = found
    assert (npu - exact).norm() <= 2 * (cpu - exact).norm()
