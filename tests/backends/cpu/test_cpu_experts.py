"""The CPU's kernels of mixtures of experts: any routing, what they read and refuse, and that a tape sees them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import hal
from hal import ops
from hal.errors import OperationError
from hal.ops import Draw
from hal.ops.form_samples import FORMS, drawn_input, drawn_weight, result_dtype
from hal.ops.forms import FLOAT
from hal.ops.tolerance import assert_agree

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [(hidden, width) for hidden in (16, 33, 64, 130) for width in (1, 24, 40)]
"""Sizes around the vectors and tiles of the kernel."""
GROUPED, MLP, ROUTE = (ops.operation(name) for name in ("grouped_linear", "expert_mlp", "topk_route"))
PLAIN = (None, None, ops.GatedActivation())


def open_cpu(native: bool) -> hal.Backend:
    return hal.open({"backend": "cpu", "options": {"native": native}})


def routed(draw: Draw, experts: Tensor, num_experts: int, hidden: int, width: int) -> list[Any]:
    """Return the arguments of expert_mlp."""
    return [
        draw.normal(experts.shape[0], hidden),
        draw.normal(num_experts, 2 * width, hidden, scale=hidden**-0.5),
        draw.normal(num_experts, hidden, width, scale=width**-0.5),
        draw.normal(*experts.shape).abs(),
        experts.int(),
        *PLAIN,
    ]


def chosen(draw: Draw, tokens: int, num_experts: int, top_k: int) -> Tensor:
    return torch.stack([draw.permutation(num_experts)[:top_k] for _ in range(tokens)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("hidden", "width"), SHAPES)
def test_any_shape(hidden: int, width: int, dtype: torch.dtype, threads: None, native: hal.Backend) -> None:
    draw = Draw(dtype, seed=hidden * width)
    for tokens, num_experts, top_k in ((1, 4, 1), (1, 8, 8), (2, 3, 2), (5, 16, 3), (19, 2, 2), (70, 3, 1)):
        arguments = routed(draw, chosen(draw, tokens, num_experts, top_k), num_experts, hidden, width)
        assert_agree(MLP, dtype, native.kernels["expert_mlp"](*arguments), MLP.reference(*arguments))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_tokens_to_one_expert(dtype: torch.dtype, threads: None, native: hal.Backend) -> None:
    """The others have no tokens. 150 rows are more than the kernel multiplies at a time."""
    draw = Draw(dtype)
    for tokens in (1, 7, 150):
        arguments = routed(draw, torch.full((tokens, 1), 3), 5, 72, 36)
        assert_agree(MLP, dtype, native.kernels["expert_mlp"](*arguments), MLP.reference(*arguments))


def test_an_expert_twice_for_a_token(native: hal.Backend) -> None:
    arguments = routed(Draw(), torch.tensor([[2, 2, 0], [1, 1, 1]]), 3, 32, 16)
    assert_agree(MLP, torch.float32, native.kernels["expert_mlp"](*arguments), MLP.reference(*arguments))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_does_not_depend_on_its_batch(dtype: torch.dtype, native: hal.Backend) -> None:
    draw = Draw(dtype)
    x, gate_up, down, weights, experts, *_ = routed(draw, chosen(draw, 90, 4, 2), 4, 130, 40)
    kernel = native.kernels["expert_mlp"]
    together = kernel(x, gate_up, down, weights, experts, *PLAIN)
    for rows in (slice(3, 4), slice(10, 13), slice(20, 61)):
        assert torch.equal(kernel(x[rows], gate_up, down, weights[rows], experts[rows], *PLAIN), together[rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_only_the_chosen_experts_are_read(dtype: torch.dtype, native: hal.Backend) -> None:
    """The weights of the others are NaN, as are a token's neighbours."""
    draw = Draw(dtype)
    x, gate_up, down, weights, experts, *_ = routed(draw, torch.tensor([[1, 4], [4, 5], [4, 1]]), 7, 48, 20)
    expected = MLP.reference(x, gate_up, down, weights, experts, *PLAIN)
    for each in (gate_up, down):
        each[[0, 2, 3, 6]] = float("nan")
    assert_agree(MLP, dtype, native.kernels["expert_mlp"](x, gate_up, down, weights, experts, *PLAIN), expected)
    x[1] = float("nan")
    found = native.kernels["expert_mlp"](x, gate_up, down, weights, experts, *PLAIN)
    assert found[1].isnan().all()
    assert_agree(MLP, dtype, found[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("groups", [(1, 1, 1), (4, 2, 1), (4, 2, 2)], ids="groups={}".format)
@pytest.mark.parametrize("sigmoid", [False, True])
def test_ties_go_to_the_lower_expert(sigmoid: bool, groups: tuple[int, int, int], native: hal.Backend) -> None:
    """Few distinct logits, so that most scores are equal, within a group and between groups."""
    draw = Draw(seed=5)
    logits = torch.cat((draw.integers(0, 3, 200, 16).float(), torch.zeros(1, 16)))
    for bias in (None, draw.integers(0, 2, 16).float()):
        arguments = logits, bias, 5, sigmoid, True, 1.5, *groups
        weights, experts = native.kernels["topk_route"](*arguments)
        expected_weights, expected = ROUTE.reference(*arguments)
        assert torch.equal(experts, expected)
        torch.testing.assert_close(weights, expected_weights)


@pytest.mark.parametrize("groups", [(1, 1, 1), (4, 2, 2)], ids="groups={}".format)
@pytest.mark.parametrize("sigmoid", [False, True])
def test_nan_logits_choose_valid_experts(sigmoid: bool, groups: tuple[int, int, int], native: hal.Backend) -> None:
    logits = Draw().normal(5, 16)
    logits[1] = float("nan")
    logits[2, 9] = float("nan")
    logits[3] = float("inf")
    logits[4, 3] = float("-inf")
    arguments = logits, None, 4, sigmoid, True, 1.0, *groups
    weights, experts = native.kernels["topk_route"](*arguments)
    expected_weights, expected = ROUTE.reference(*arguments)
    assert torch.equal(experts, expected)
    torch.testing.assert_close(weights, expected_weights, equal_nan=True)
    assert weights[1:3].isnan().all()
    assert weights[[0, 4]].isfinite().all()
    assert all(len(set(row)) == 4 and min(row) >= 0 and max(row) < 16 for row in experts.tolist())


@pytest.mark.parametrize("expert", [-1, 4, 2**31 - 1])
def test_a_missing_expert_is_refused(expert: int, native: hal.Backend) -> None:
    arguments = routed(Draw(), torch.tensor([[0, 1], [3, expert]]), 4, 32, 16)
    with pytest.raises(OperationError, match=f"token 1 has expert {expert}, but there are 4 experts"):
        native.kernels["expert_mlp"](*arguments)
    with pytest.raises(OperationError, match=f"token 1 has expert {expert}, but there are 4 experts"):
        native.kernels["expert_permute"](arguments[0], arguments[4], 4)
    with pytest.raises(OperationError, match="position 6 is outside 4 rows"):
        native.kernels["expert_unpermute"](torch.ones(4, 8), torch.tensor([0, 6, 1, 2]).int(), torch.ones(2, 2))


@pytest.mark.parametrize("counts", [[3, 3], [6, 0], [6, -1], [2**62, 2**62]])
@pytest.mark.parametrize("by_torch", [False, True], ids=["C++", "torch"])
def test_counts_beyond_the_rows_are_refused(by_torch: bool, counts: list[int]) -> None:
    kernel, draw = open_cpu(native=not by_torch).kernels["grouped_linear"], Draw()
    for form in (FLOAT, *FORMS):
        weight, scale, zero = (
            (draw.normal(2, 4, 32), None, None) if form == FLOAT else drawn_weight(draw, form, 2, 4, 32)
        )
        x, x_scale = drawn_input(draw, form, 5, 32)
        given = x, weight, torch.tensor(counts), None, scale, zero, x_scale, result_dtype(draw, x), form
        with pytest.raises(OperationError, match=r"grouped_linear: the experts have .* rows, but x has only 5"):
            kernel(*given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("native", [True, False], ids=["C++", "torch"])
def test_rows_beyond_the_counts_change_nothing(native: bool, dtype: torch.dtype) -> None:
    kernel, draw = open_cpu(native).kernels["grouped_linear"], Draw(dtype, seed=5)
    for sample in GROUPED.samples(draw):
        arguments = GROUPED.arguments(sample, {})
        longer = dict(arguments)
        for each in ("x", "x_scale"):
            if (given := arguments[each]) is not None:
                longer[each] = torch.cat([given, given.new_full((3, *given.shape[1:]), 7)])
                arguments[each] = longer[each][:-3]  # as contiguous: torch may multiply others by another kernel
        found, expected = kernel(*longer.values()), kernel(*arguments.values())
        rows = expected.shape[0]
        assert found.shape[0] == rows + 3
        assert torch.equal(found[:rows], expected), sample[-1]
        assert_agree(GROUPED, dtype, found[:rows], GROUPED.reference(*arguments.values()))


@pytest.mark.parametrize("native", [True, False], ids=["C++", "torch"])
def test_a_tape_replays_other_routings(native: bool, threads: None) -> None:
    """The number of rows of each expert changes between replays: all to one, none to some."""
    backend, draw = open_cpu(native), Draw()
    logits, (x, gate_up, down, *_) = draw.normal(6, 8), routed(draw, chosen(draw, 6, 8, 2), 8, 48, 20)

    def block(x: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, experts = ops.topk_route(logits, None, 2, False, True, 1.0, 1, 1, 1)
        rows, counts, positions = ops.expert_permute(x, experts, 8)
        parts = ops.silu_and_mul(ops.grouped_linear(rows, gate_up, counts))
        unfused = ops.expert_unpermute(ops.grouped_linear(parts, down, counts), positions, weights)
        return ops.expert_mlp(x, gate_up, down, weights, experts, *PLAIN), unfused

    def expected() -> Tensor:
        weights, experts = ROUTE.reference(logits, None, 2, False, True, 1.0, 1, 1, 1)
        result: Tensor = MLP.reference(x, gate_up, down, weights, experts, *PLAIN)
        return result

    graph = backend.graph()
    outputs = graph.capture(lambda: block(x, logits))
    addresses = [each.data_ptr() for each in outputs]
    favoured = torch.zeros(8)
    favoured[[2, 5]] = 50.0
    for new in (logits.clone(), draw.normal(6, 8), favoured.expand(6, 8), -favoured.expand(6, 8)):
        logits.copy_(new)
        x.copy_(draw.normal(6, 48))
        graph.replay()
        for output in outputs:
            torch.testing.assert_close(output, expected(), rtol=1e-4, atol=1e-5)
    assert addresses == [each.data_ptr() for each in outputs]


@pytest.mark.parametrize("native", [True, False], ids=["C++", "torch"])
def test_a_tape_replays_experts_of_every_form(native: bool) -> None:
    backend = open_cpu(native)
    for sample in {sample[-1]: sample for sample in GROUPED.samples(Draw())}.values():
        graph, counts = backend.graph(), sample[2]
        output = graph.capture(lambda given=sample: ops.grouped_linear(*given))
        counts.copy_(counts.flip(0))
        graph.replay()
        rows = int(counts.sum())
        assert_agree(GROUPED, torch.float32, output[:rows], GROUPED.reference(*sample)[:rows])
