"""Triton's kernels of mixtures of experts against the references. Run by test_triton_kernels.py, in a process of its
own.

The interpreter takes its time: `make test` runs what is not marked as thorough.
"""

from __future__ import annotations

from functools import partial
from itertools import islice

import pytest
import torch
from hal.backends.triton import KERNELS
from hal.backends.triton.experts.grouped import most_tiles, tiles
from helpers.triton_checking import DTYPES, EXPERTS, check, every_dtype, further, moved
from torch import Tensor

from hal import ops
from hal.errors import OperationError
from hal.ops import Draw, GatedActivation, Sample
from hal.ops.experts.routing import routing
from hal.ops.form_samples import INT8, INT8_DYNAMIC, INT8_STATIC, drawn_bias, drawn_input, drawn_weight
from hal.ops.forms import Form

agree = partial(check, sides=("after",))
"""In one run, between fences at the tensors' ends."""
PLAIN = (None, None, GatedActivation())


@pytest.mark.parametrize("name", sorted(EXPERTS))
def test_some_declared_samples(name: str) -> None:
    dtype = DTYPES[len(name) % 3]
    cases = 0
    for sample in islice(ops.operation(name).samples(Draw(dtype, seed=1)), 1, None, 7):
        agree(name, dtype, sample)
        cases += 1
    assert cases


@every_dtype
@further
@pytest.mark.parametrize("name", sorted(EXPERTS))
def test_declared_samples(name: str, dtype: torch.dtype) -> None:
    cases = 0
    for sample in ops.operation(name).samples(Draw(dtype, seed=0)):
        check(name, dtype, sample)
        cases += 1
    assert cases > 2


class TestRouting:
    """The choice of experts."""

    def chosen(self, choice: Tensor, top_k: int) -> list[list[int]]:
        """The experts of highest choice, by Python's sort; of equal ones, the lower first."""
        return [sorted(range(len(row)), key=lambda expert: (-row[expert], expert))[:top_k] for row in choice.tolist()]

    @pytest.mark.parametrize("sigmoid", [False, True])
    def test_the_lower_of_equal_experts_is_chosen(self, sigmoid: bool) -> None:
        logits = Draw(seed=3).integers(-1, 2, 6, 12).float()
        logits[0] = 0.0
        logits[1, ::2] = -0.0
        logits[2] = -300.0  # scores that underflow
        logits[2, 7] = 0.0
        sample = (logits, None, 5, sigmoid, True, 1.0, 1, 1, 1)
        _, experts = agree("topk_route", torch.float32, sample)
        scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
        assert experts.tolist() == self.chosen(scores, 5)

    @every_dtype
    @further
    def test_a_bias_decides_and_does_not_weigh(self, dtype: torch.dtype) -> None:
        draw = Draw(dtype, seed=4)
        logits, bias = draw.normal(5, 10), torch.tensor([0.0] * 8 + [9.0, -9.0])
        weights, experts = agree("topk_route", dtype, (logits, bias, 9, True, False, 1.0, 1, 1, 1))
        assert (experts[:, 0] == 8).all()
        assert not (experts == 9).any()
        torch.testing.assert_close(weights[:, 0].cpu(), logits[:, 8].float().sigmoid().to(dtype), rtol=1e-2, atol=1e-3)
        # Scores that underflow, with biases of 0 and -0, and a sum that cancels: all tie.
        logits = torch.full((1, 4), -200.0, dtype=dtype)
        logits[0, 3] = 0.0
        sample = (logits, torch.tensor([-0.0, 0.0, -0.0, -0.5]), 4, True, False, 1.0, 1, 1, 1)
        assert agree("topk_route", dtype, sample)[1].tolist() == [[0, 1, 2, 3]]

    @further
    @pytest.mark.parametrize(
        ("experts", "num_groups", "top_groups", "best"),
        [(12, 3, 2, 2), (160, 8, 3, 1), (20, 5, 1, 2), (7, 7, 3, 2), (6, 2, 2, 1)],
    )
    def test_groups_of_any_size(self, experts: int, num_groups: int, top_groups: int, best: int) -> None:
        draw = Draw(seed=experts)
        top_k = min(experts // num_groups * top_groups, 4)
        for sigmoid in (False, True):
            bias = draw.normal(experts) if sigmoid else None
            agree(
                "topk_route",
                torch.float32,
                (draw.normal(9, experts), bias, top_k, sigmoid, True, 2.0, num_groups, top_groups, best),
            )
        # Groups tie: the lower one is chosen, and its lower experts.
        found = agree(
            "topk_route",
            torch.float32,
            (torch.zeros(2, experts), None, top_k, False, True, 1.0, num_groups, top_groups, best),
        )[1]
        assert found.tolist() == [list(range(top_k))] * 2

    @pytest.mark.parametrize("sigmoid", [False, True])
    @pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
    def test_what_is_not_finite_stays_in_its_token(self, broken: float, sigmoid: bool) -> None:
        draw = Draw(seed=5)
        logits = draw.normal(4, 10)
        logits[1, 3], logits[2] = broken, broken
        sample = (logits, None, 3, sigmoid, True, 1.0, 1, 1, 1)
        weights, experts = (each.cpu() for each in KERNELS["topk_route"](*moved(sample)))
        wanted = ops.operation("topk_route").reference(*sample)
        torch.testing.assert_close(weights, wanted[0], equal_nan=True)
        assert torch.equal(experts, wanted[1])
        assert weights[[0, 3]].isfinite().all()
        assert ((experts >= 0) & (experts < 10)).all()
        assert all(len(set(row)) == 3 for row in experts.tolist())
        if broken != broken:
            assert weights[[1, 2]].isnan().all()

    @every_dtype
    @further
    def test_rows_of_a_wider_tensor(self, dtype: torch.dtype) -> None:
        wide = Draw(dtype, seed=6).normal(5, 40)
        for view in (wide[:, 8:24], wide[:, ::2], wide[::2, :17]):
            agree("topk_route", dtype, (view, None, 3, False, True, 1.0, 1, 1, 1))


class TestOrder:
    """The permutation by expert, and the sum that undoes it."""

    @pytest.mark.parametrize(("tokens", "num_experts", "top_k"), [(3, 5, 2), (33, 40, 2), (300, 9, 4)])
    def test_it_is_stable(self, tokens: int, num_experts: int, top_k: int) -> None:
        """In one block of assignments and in several."""
        draw = Draw(seed=tokens)
        x, experts = draw.normal(tokens, 3), routing(draw, tokens, num_experts, top_k)
        found = [each.cpu() for each in KERNELS["expert_permute"](*moved((x, experts, num_experts)))]
        for one, other in zip(found, ops.operation("expert_permute").reference(x, experts, num_experts), strict=True):
            assert one.dtype is other.dtype
            assert torch.equal(one, other)

    @further
    @pytest.mark.parametrize("count", [63, 64, 65, 511, 512, 513, 1024, 1500])
    def test_any_number_of_assignments(self, count: int) -> None:
        draw = Draw(seed=count)
        for experts in (draw.integers(0, 3, count, 1), draw.integers(60, 61, count, 1), draw.integers(0, 70, count, 1)):
            agree("expert_permute", torch.float32, (draw.normal(count, 2), experts.int(), 70))

    @every_dtype
    @further
    def test_views(self, dtype: torch.dtype) -> None:
        draw = Draw(dtype, seed=2)
        wide, experts = draw.normal(6, 64), torch.cat([routing(draw, 6, 8, 2)] * 2, 1)
        for view in (wide[:, 3:20], wide[:, ::3]):
            agree("expert_permute", dtype, (view, experts[:, 1:3], 8))
        rows, positions = draw.normal(12, 50), draw.permutation(12)
        agree("expert_unpermute", dtype, (rows[:, 4:30], positions, draw.normal(6, 6)[:, 1:3]))
        agree("expert_unpermute", dtype, (rows[:, ::2], positions, draw.normal(6, 4)[:, ::2]))

    def test_wide_rows(self) -> None:
        draw = Draw(torch.bfloat16, seed=3)
        experts = routing(draw, 3, 4, 2)
        rows, _, positions = agree("expert_permute", torch.bfloat16, (draw.normal(3, 1500), experts, 4))
        agree("expert_unpermute", torch.bfloat16, (rows.cpu(), positions.cpu(), draw.normal(3, 2).abs()))


class TestProducts:
    """Grouped products and MLPs."""

    # Of few rows per expert, of more and of many; empty experts at both ends, and the last tile of each size partial.
    COUNTS = ([0, 1, 17, 0, 3, 0], [0, 129, 0, 40, 1, 0], [300, 0, 1, 0], [0, 0, 0, 5], [4, 0, 0, 0])

    @pytest.mark.parametrize("counts", COUNTS[:2], ids=str)
    def test_any_counts(self, counts: list[int]) -> None:
        dtype = DTYPES[counts[1] % 3]
        draw = Draw(dtype, seed=7)
        weight = draw.normal(len(counts), 72, 40, scale=0.2)
        agree("grouped_linear", dtype, (draw.normal(sum(counts), 40), weight, torch.tensor(counts)))

    @further
    @pytest.mark.parametrize("counts", COUNTS, ids=str)
    @pytest.mark.parametrize(("out", "width"), [(130, 128), (8, 3), (65, 200)])
    def test_any_counts_and_widths(self, counts: list[int], out: int, width: int) -> None:
        dtype = DTYPES[(sum(counts) + out) % 3]
        draw = Draw(dtype, seed=out)
        experts, rows, per_expert = len(counts), sum(counts), torch.tensor(counts)
        x, weight = draw.normal(rows, width), draw.normal(experts, out, width, scale=width**-0.5)
        agree("grouped_linear", dtype, (x, weight, per_expert))
        agree("grouped_linear", dtype, (draw.normal(rows, width + 5)[:, 2:-3], weight.flip(2), per_expert))
        for form in (INT8, INT8_DYNAMIC, INT8_STATIC):
            sample = self.of_form(draw, form, per_expert, width, out, biased=form is INT8_STATIC)
            found = agree("grouped_linear", dtype, sample)
            wanted = ops.operation("grouped_linear").reference(*sample)
            assert not form.exact or torch.equal(found.cpu(), wanted), f"{form} is not exact"

    def of_form(self, draw: Draw, form: Form, counts: Tensor, width: int, out: int, *, biased: bool) -> Sample:
        weight, scale, zero = drawn_weight(draw, form, len(counts), out, width)
        x, x_scale = drawn_input(draw, form, int(counts.sum()), width)
        bias = drawn_bias(draw, form, len(counts), out, place=1) if biased else None
        return x, weight, counts, bias, scale, zero, x_scale, draw.dtype, form

    @pytest.mark.parametrize(
        "form",
        [
            Form("int4", columns=32, zero_points=True),
            Form("int8", columns=48, zero_points=True),
            Form("int4", columns=32, inputs="int8"),
            Form("int4", columns=48, inputs="int8"),
            Form("float8", rows=64, columns=32),
            Form("float4", columns=32, scales="e8m0"),
        ],
        ids=str,
    )
    def test_many_rows_of_packed_weights(self, form: Form) -> None:
        """A launch widens the weights of all experts, whose last block of rows is smaller."""
        draw = Draw(torch.bfloat16, seed=1)
        sample = self.of_form(draw, form, torch.tensor([130, 0, 70]), 96, 80, biased=True)
        agree("grouped_linear", torch.bfloat16, sample)

    def test_nothing_spreads(self) -> None:
        """NaN in a row stays in it, and that of experts without rows is not read."""
        draw = Draw(seed=8)
        counts = torch.tensor([0, 3, 0, 18])
        x, weight = draw.normal(21, 40), draw.normal(4, 24, 40)
        x[4], weight[0], weight[2] = float("nan"), float("nan"), float("nan")
        found = KERNELS["grouped_linear"](*moved((x, weight, counts))).cpu()
        assert found[4].isnan().all()
        assert found[[row for row in range(21) if row != 4]].isfinite().all()
        experts = torch.tensor([[1, 3]] * 21, dtype=torch.int32)
        sample = (x, draw.normal(4, 32, 40), draw.normal(4, 40, 16), draw.normal(21, 2), experts, *PLAIN)
        for weights in sample[1:3]:
            weights[[0, 2]] = float("nan")
        found = KERNELS["expert_mlp"](*moved(sample)).cpu()
        assert found[4].isnan().all()
        assert found[[row for row in range(21) if row != 4]].isfinite().all()

    @further
    @pytest.mark.parametrize(("tokens", "num_experts", "top_k"), [(1, 64, 8), (40, 3, 3), (150, 2, 2), (9, 4, 1)])
    def test_mlps_of_any_routing(self, tokens: int, num_experts: int, top_k: int) -> None:
        dtype = DTYPES[(tokens + top_k) % 3]
        draw = Draw(dtype, seed=tokens)
        hidden, width = 70, 36
        x, weights = draw.normal(tokens, hidden + 3)[:, :-3], draw.normal(tokens, top_k).abs()
        gate_up = draw.normal(num_experts, 2 * width, hidden, scale=hidden**-0.5)
        down = draw.normal(num_experts, hidden, width, scale=width**-0.5)
        for experts in (routing(draw, tokens, num_experts, top_k), routing(draw, 1, num_experts, top_k)):
            chosen = experts.expand(tokens, -1)  # each token's own, then the same for all
            agree("expert_mlp", dtype, (x, gate_up, down, weights, chosen, *PLAIN))

    def test_the_grid_covers_all_counts(self) -> None:
        draw = Draw(seed=9)
        for rows in (16, 64, 128):
            for count, num_experts in ((0, 3), (1, 8), (8, 128), (127, 4), (640, 5), (1000, 64)):
                most = most_tiles(count, num_experts, rows)
                for _ in range(20):
                    owners = draw.integers(0, num_experts, count) * draw.integers(0, 2, count)
                    assert sum(-(-each // rows) for each in owners.bincount().tolist()) <= most
                spread = [1] * (min(count, num_experts) - 1)
                worst = [*spread, count - len(spread)] if count else []
                assert sum(-(-each // rows) for each in worst) == most
        assert {tiles(count, 8, False, 2).rows for count in (1, 128, 129, 512, 513)} == {16, 64, 128}


def test_what_does_not_fit_is_refused() -> None:
    draw = Draw(seed=0)
    x, weight, counts = draw.normal(6, 32), draw.normal(4, 16, 32), torch.tensor([1, 2, 3, 0])
    rows8, weight8, scale = x.to(torch.int8), weight.to(torch.int8), torch.ones(4, 16, 1)
    experts, weights = torch.zeros(6, 2, dtype=torch.int32), draw.normal(6, 2)
    down, down8, down_scale = draw.normal(4, 32, 8), draw.normal(4, 32, 8).to(torch.int8), torch.ones(4, 32, 1)
    one, static = torch.ones(1), (weight8, scale, None)
    for name, sample in (
        ("topk_route", (x, None, 33, False, True, 1.0, 1, 1, 1)),
        ("topk_route", (x, None, 0, False, True, 1.0, 1, 1, 1)),
        ("topk_route", (x, None, 2, False, True, 1.0, 5, 1, 1)),
        ("topk_route", (x, None, 9, False, True, 1.0, 4, 1, 1)),
        ("topk_route", (x, torch.ones(31), 2, False, True, 1.0, 1, 1, 1)),
        ("expert_permute", (x, experts[:5], 4)),
        ("expert_permute", (x, experts.long(), 4)),
        ("expert_unpermute", (x, torch.zeros(6, dtype=torch.int32), weights)),
        ("expert_unpermute", (x, torch.zeros(6, dtype=torch.int64), weights[:3])),
        ("grouped_linear", (x, weight.half(), counts)),
        ("grouped_linear", (x[:, :31], weight, counts)),
        ("grouped_linear", (x, weight, counts[:3])),
        ("grouped_linear", (x, weight, counts.int())),
        ("grouped_linear of int8", (x, weight, counts, None, scale, None, None, None, INT8)),
        ("grouped_linear of int8", (x, weight8, counts, None, scale[:, :8], None, None, None, INT8)),
        ("grouped_linear of int8", (x, weight8, counts[:3], None, scale, None, None, None, INT8)),
        ("grouped_linear of int8", (x, weight8, counts.int(), None, scale, None, None, None, INT8)),
        ("grouped_linear of int8", (x, weight8, counts, scale, scale, None, None, None, INT8)),
        ("grouped_linear of int8", (x, weight8, counts, None, scale, None, x[:, 0], None, INT8_DYNAMIC)),
        ("grouped_linear of int8", (rows8, weight8, counts, None, scale, None, one, x.dtype, INT8_DYNAMIC)),
        ("expert_mlp", (x, weight, down[:, :, :7], weights, experts, *PLAIN)),
        ("expert_mlp", (x, weight, down, weights[:, :1], experts, *PLAIN)),
        ("expert_mlp", (x, weight, down.half(), weights, experts, *PLAIN)),
        ("quant_expert_mlp_dynamic", (x, weight8, scale, down8, scale, weights, experts)),
        (
            "quant_expert_mlp_static",
            (x, one, None, *static, one.int(), None, down8, down_scale, None, weights, experts),
        ),
    ):
        with pytest.raises(OperationError, match=f"{name}.* was given"):
            KERNELS[name.partition(" ")[0]](*moved(sample))
