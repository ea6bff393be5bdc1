"""Tests for kernels composed of torch functions, on the CPU: their results do not depend on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hal.backends.cuda.attention import TorchAttention
from hal.backends.cuda.flashinfer.plans import Plan, Shape, pages_of
from hal.backends.cuda.libraries import KERNELS, int8_product
from helpers.attending import paged_sample, with_blind_queries
from helpers.thorough import DRAW, thorough
from torch import Tensor

from hal import ops
from hal.ops import AttentionOptions, Draw
from hal.ops.form_samples import INT8_STATIC
from hal.ops.kernels.composed_attention import decode, one_by_one
from hal.ops.tolerance import assert_agree

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ATTENTION = TorchAttention(flash=False)
TABLE: dict[str, Callable[..., Any]] = {**KERNELS, "paged_attention": ATTENTION}


@thorough(DRAW, r"\[seed=[1-9]")
@pytest.mark.parametrize("name", sorted(TABLE))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(3), ids="seed={}".format)
def test_it_meets_the_reference(seed: int, dtype: torch.dtype, name: str) -> None:
    operation = ops.operation(name)
    for sample, again in zip(
        operation.samples(Draw(dtype, seed=seed)), operation.samples(Draw(dtype, seed=seed)), strict=True
    ):
        with torch.inference_mode():
            found, expected = TABLE[name](*sample), operation.reference(*again)
        assert_agree(operation, dtype, (found, sample), (expected, again), f"seed {seed}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(3), ids="seed={}".format)
def test_queries_that_attend_to_no_key(seed: int, dtype: torch.dtype) -> None:
    operation = ops.operation("scaled_dot_product_attention")
    for sample in with_blind_queries(Draw(dtype, seed=seed)):
        found, expected = TABLE[operation.name](*sample), operation.reference(*sample)
        assert not expected.any(-1).all()
        assert_agree(operation, dtype, found, expected, f"seed {seed}")


@pytest.mark.parametrize("lengths", [[1], [8, 9, 7], [0, 16, 0], [0, 0]], ids=str)
@pytest.mark.parametrize("window", [None, 1, 8, 100])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_decodes_two_ways(lengths: list[int], window: int | None, softcap: float | None, with_sinks: bool) -> None:
    """Test the masked form, used in captures, and the per-sequence form.

    Both ignore unfilled slots, even if they hold NaN.
    """
    given = {"heads": (6, 2), "head_dim": 16, "sinks": with_sinks, "window": window, "softcap": softcap}
    case = paged_sample(Draw(seed=7), [1] * len(lengths), lengths, **given)
    query, keys, values, table, starts, kv_lens, _, _, *options = case
    expected = ops.operation("paged_attention").reference(*case)
    found = decode(query, keys, values, table, kv_lens, *options)
    again = one_by_one(query, keys, values, table, starts.tolist(), lengths, *options)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(again, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [0, 1, 16, 17, 40])
def test_the_product_of_int8_is_exact(rows: int) -> None:
    """Exact also for fewer rows than cuBLAS accepts."""
    draw = Draw(seed=rows)
    x = draw.integers(-128, 128, rows, 64, dtype=torch.int8)
    weight = draw.integers(-128, 128, 24, 64, dtype=torch.int8)
    assert torch.equal(int8_product(x, weight), x.int() @ weight.int().t())
    assert int8_product(x.view(rows, 1, 64), weight).shape == (rows, 1, 24)


@pytest.mark.parametrize("out", [16, 20])
@pytest.mark.parametrize("width", [32, 36])
def test_a_projection_of_any_width_is_served(width: int, out: int) -> None:
    """cuBLAS requires multiples of 8; other widths run the reference."""
    draw = Draw(seed=1)
    x, weight = (draw.integers(-128, 128, rows, width, dtype=torch.int8) for rows in (3, out))
    scale, bias = draw.normal(out).abs() * 1e-4, draw.integers(-100, 100, out, dtype=torch.int32)
    arguments = (x, weight, bias, scale.unsqueeze(-1), None, None, torch.float32, INT8_STATIC)
    expected = ops.operation("linear").reference(*arguments)
    torch.testing.assert_close(KERNELS["linear"](*arguments), expected)


@pytest.mark.parametrize("block_size", [1, 8, 16])
@pytest.mark.parametrize("lengths", [[1], [0], [8, 0, 17, 16], [0, 3]], ids=str)
def test_where_a_plan_finds_its_blocks(lengths: list[int], block_size: int) -> None:
    columns = 20
    table = torch.arange(len(lengths) * columns).view(len(lengths), columns) * 10
    ends, places, last = pages_of(torch.tensor(lengths, dtype=torch.int32), block_size, columns)
    counts = [-(-length // block_size) for length in lengths]
    expected = [table[row, :count] for row, count in enumerate(counts)]
    assert torch.equal(table.flatten()[places], torch.cat(expected))
    assert ends.tolist() == [sum(counts[:row]) for row in range(len(counts) + 1)]
    spans = zip(ends.diff().tolist(), last.tolist(), strict=True)
    # FlashInfer recomputes the lengths.
    assert [max(count - 1, 0) * block_size + left for count, left in spans] == lengths
    assert ends.dtype == last.dtype == torch.int32


def test_what_flashinfer_takes() -> None:
    def shape(
        head_dim: int = 128, dtype: torch.dtype = torch.bfloat16, sinks: Tensor | None = None, **options: Any
    ) -> Shape:
        cache: Tensor = torch.empty(2, 16, 2, head_dim, dtype=dtype)
        query = torch.empty(3, 8, head_dim, dtype=dtype)
        options = AttentionOptions(0.1, **options)
        return Shape.of({"query": query, "key_cache": cache, "sinks": sinks, "options": options})

    assert shape().supported
    assert shape(window=4).supported
    assert shape(window=4).settings()["window_left"] == 3
    assert shape(softcap=30.0).supported
    assert shape(softcap=30.0).settings()["logits_soft_cap"] == 30.0
    assert shape(causal=False).supported
    for refused in (shape(80), shape(dtype=torch.float32), shape(causal=False, window=4), shape(sinks=torch.ones(8))):
        assert not refused.supported
    assert (shape().heads, shape().kv_heads, shape().block_size, shape().tensor_cores) == (8, 2, 16, True)


class TestPlansAreShared:
    """Plans are shared by the layers of one step only."""

    def step(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        table = torch.arange(6, dtype=torch.int32).view(2, 3)
        return table, torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([5, 9], dtype=torch.int32)

    def planned(self, step: tuple[torch.Tensor, ...], layers: set[int]) -> Plan:
        plan = Plan.of(torch.abs, *step)
        plan.layers |= layers
        return plan

    def test_a_layer_that_comes_again_begins_another_step(self) -> None:
        step = self.step()
        plan = self.planned(step, {1, 2})
        assert plan.serves(3, *step)
        assert not plan.serves(1, *step)

    @pytest.mark.parametrize("changed", range(3), ids=["table", "starts", "lengths"])
    def test_another_models_layer_sees_what_was_written_since(self, changed: int) -> None:
        """A draft and its target may share a batch, which the engine updates between them."""
        step = self.step()
        plan = self.planned(step, {1, 2})
        with torch.inference_mode():
            step[changed].add_(1)
        assert not plan.serves(3, *step)

    def test_another_table_is_another_step(self) -> None:
        step = self.step()
        assert not self.planned(step, {1}).serves(2, step[0].clone(), *step[1:])

    def test_tables_whose_writes_torch_does_not_count(self) -> None:
        with torch.inference_mode():
            step = self.step()
        plan = self.planned(step, {1})
        assert plan.serves(2, *step)
        assert not plan.serves(2, *step[:2], step[2] + 1)
