"""Tests of the declarations of the exchange of experts' rows: bodies and references say the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from hal import ops
from hal.device.group import Group, forget_group, register_group
from hal.ops import Draw
from hal.ops.experts.dispatch import from_digits, to_digits
from hal.ops.experts.routing import routing

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(params=[(0, 2), (1, 2), (3, 4)], ids=str)
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    """Return a group whose other ranks do not exist: references do not communicate."""
    made = Group("imagined", *request.param, object())
    register_group(made)
    yield made
    forget_group(made)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_survive_as_digits(dtype: torch.dtype) -> None:
    numbers = torch.arange(1 << 16, dtype=torch.int32)
    assert torch.equal(from_digits(*to_digits(numbers, dtype)), numbers)


def test_bodies_are_the_references_of_equal_ranks(group: Group) -> None:
    draw, dispatch, combine = Draw(seed=3), ops.operation("expert_dispatch"), ops.operation("expert_combine")
    exchange = ops.operation("all_to_all")
    x = draw.normal(12, 6)
    assert torch.equal(
        exchange.reference(x, group.name), exchange.over_shards([(x, group.name)] * group.size)[group.rank]
    )
    for tokens, num_experts, top_k in ((7, 8, 3), (5, 4, 4), (0, 8, 2), (9, 16, 1)):
        sample = draw.normal(tokens, 6), routing(draw, tokens, num_experts, top_k), num_experts, group.name
        found = dispatch.reference(*sample)
        expected = dispatch.over_shards([sample] * group.size)[group.rank]
        assert [each.shape for each in found] == [each.shape for each in expected]
        assert [each.dtype for each in found] == [each.dtype for each in expected]
        rows = int(expected[1].sum())
        assert found[0].shape[0] == group.size * tokens * min(top_k, num_experts // group.size)
        assert torch.equal(found[0][:rows], expected[0][:rows])
        assert torch.equal(found[1], expected[1])
        assert torch.equal(found[2], expected[2])
        given = (found[0], sample[1], draw.normal(tokens, top_k), *found[2:], num_experts, group.name)
        torch.testing.assert_close(
            combine.reference(*given), combine.over_shards([given] * group.size)[group.rank], rtol=0, atol=0
        )


def _spread(counts: Tensor) -> Tensor:
    return torch.repeat_interleave(torch.arange(counts.shape[0]), counts)


@pytest.mark.parametrize("seed", range(4))
def test_references_return_what_they_sent(seed: int) -> None:
    """Over the shards, combining the dispatched rows, each times its expert's number, gives the weighted sums."""
    draw, ranks, num_experts, top_k = Draw(seed=seed), 4, 8, 3
    shards = [(draw.normal(6, 5), routing(draw, 6, num_experts, top_k), num_experts, "any") for _ in range(ranks)]
    weights = [draw.normal(6, top_k) for _ in range(ranks)]
    back = []
    for rank, (rows, counts, sent, received) in enumerate(ops.operation("expert_dispatch").over_shards(shards)):
        used = int(counts.sum())
        computed = torch.full_like(rows, float("nan"))
        computed[:used] = rows[:used] * (_spread(counts) + rank * num_experts // ranks).unsqueeze(-1)
        back.append((computed, shards[rank][1], weights[rank], sent, received, num_experts, "any"))
    for (x, experts, *_), weight, result in zip(
        shards, weights, ops.operation("expert_combine").over_shards(back), strict=True
    ):
        torch.testing.assert_close(result, x * (weight * experts).sum(-1, keepdim=True))
