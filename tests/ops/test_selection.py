"""Tests of sparse attention, by the reference and by the CPU's kernels, against loops in float64."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.paged_step import Step

import hal
from hal import ops
from hal.errors import OperationError
from hal.ops import AttentionOptions

SEED = random.randrange(1 << 30)
Kernels = dict[str, Callable[..., Any]]


@pytest.fixture(params=["reference", "cpu"])
def kernels(request: pytest.FixtureRequest, cpu: hal.Backend) -> Kernels:
    names = ("select_keys", "attend_selected")
    if request.param == "reference":
        return {name: ops.operation(name).reference for name in names}
    return {name: cpu.kernels[name] for name in names}


@pytest.mark.parametrize("case", range(12))
@pytest.mark.parametrize("group", [1, 4])
def test_the_highest_scores_are_selected(kernels: Kernels, case: int, group: int) -> None:
    step = Step(SEED + case, group)
    heads, dim = step.random.choice((1, 3, 16, 33)), step.random.choice((16, 24, 128))
    budget = group * step.random.choice((1, 5, 64, 300, 2000))
    query, weights = step.normal(step.tokens + step.padding, heads, dim), step.normal(step.tokens + step.padding, heads)
    cache, keys = step.cache(dim, rows=group)
    call = query, weights, cache, step.table, step.starts, step.kv_lens, budget, group
    found = kernels["select_keys"](*call)
    assert found.dtype is torch.int32
    assert found.shape == (step.tokens + step.padding, budget + group - 1)
    assert (found[step.tokens :] == -1).all()
    for token, (sequence, position) in enumerate(step.places):
        complete = (position + 1) // group
        scores = (query[token].double() @ keys[sequence][:complete].T).relu().T @ weights[token].double()
        row = found[token].tolist()
        chosen = row[: row.index(-1)] if -1 in row else row
        assert chosen == sorted(set(chosen))
        assert set(row[len(chosen) :]) <= {-1}
        tail = list(range(complete * group, position + 1))
        assert chosen[len(chosen) - len(tail) :] == tail
        groups = [each // group for each in chosen[: len(chosen) - len(tail) : group]]
        assert chosen[: len(chosen) - len(tail)] == [each * group + at for each in groups for at in range(group)]
        assert len(groups) == min(complete, budget // group)
        left = torch.ones(complete, dtype=torch.bool)
        left[groups] = False
        if left.any() and groups:  # within the rounding of float32
            assert scores[groups].min() >= scores[left].max() - 1e-5 * scores.abs().max()


def test_of_equal_scores_the_lower_position_is_selected(kernels: Kernels) -> None:
    scores = torch.tensor([0, 3, 1, 3, 2, 1, 1, 3, 0, 1, 5, -1, 1], dtype=torch.float32)
    cache = scores.relu().view(1, 13, 1)
    table, starts, lens = torch.zeros(1, 1).int(), torch.tensor([0, 1]).int(), torch.tensor([13]).int()
    for weight, wanted in (
        (1.0, [1, 2, 3, 4, 5, 7, 10]),
        (-1.0, [0, 2, 5, 6, 8, 9, 11]),
        (0.0, [0, 1, 2, 3, 4, 5, 6]),
        (float("nan"), [0, 1, 2, 3, 4, 5, 6]),
    ):
        call = torch.ones(1, 1, 1), torch.full((1, 1), weight), cache, table, starts, lens
        assert kernels["select_keys"](*call, 7)[0].tolist() == wanted, weight
        assert kernels["select_keys"](*call, 14)[0].tolist() == [*range(13), -1]
    cache[0, 6] = float("nan")  # shows in the attention
    assert kernels["select_keys"](torch.ones(1, 1, 1), torch.ones(1, 1), cache, table, starts, lens, 2).tolist() == [
        [6, 10]
    ]


@pytest.mark.parametrize("case", range(12))
def test_only_selected_positions_are_attended_to(kernels: Kernels, case: int) -> None:
    step = Step(SEED + case)
    heads, rank, rope_dim = step.random.choice((1, 5, 16)), step.random.choice((40, 128)), step.random.choice((8, 64))
    query, rope = (step.normal(step.tokens + step.padding, heads, size) for size in (rank, rope_dim))
    (latents, held), (ropes, turned) = step.cache(rank), step.cache(rope_dim)
    selected = step.random.choice((1, 7, 600, 1200))
    positions = torch.full((step.tokens + step.padding, selected), -1, dtype=torch.int32)
    wanted = torch.zeros_like(query)
    for token, (sequence, position) in enumerate(step.places):
        count = min(selected, position + 1)
        chosen = torch.randperm(position + 1, generator=step.draw)[:count].sort().values
        positions[token, :count] = chosen.int()
        keys = torch.cat((held[sequence], turned[sequence]), -1)[chosen]
        scores = torch.cat((query[token], rope[token]), -1).double() @ keys.T * 0.1
        wanted[token] = (scores.softmax(-1) @ held[sequence][chosen]).float()
    call = query, rope, latents, ropes, positions, step.table, step.starts, 0.1
    found = kernels["attend_selected"](*call)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("case", range(6))
def test_a_budget_of_all_is_full_attention(kernels: Kernels, case: int) -> None:
    step = Step(SEED + case)
    query, rope = step.normal(step.tokens, 6, 32), step.normal(step.tokens, 6, 16)
    (latents, _), (ropes, _), (index, _) = step.cache(32), step.cache(16), step.cache(8)
    found = kernels["select_keys"](
        *(step.normal(step.tokens, 2, 8), step.normal(step.tokens, 2), index),
        *(step.table, step.starts, step.kv_lens, max(step.lens) + 1),
    )
    attended = kernels["attend_selected"](query, rope, latents, ropes, found, step.table, step.starts, 0.2)
    keys = torch.cat((latents, ropes), -1).unsqueeze(2)
    full = ops.operation("paged_attention").reference(
        *(torch.cat((query, rope), -1), keys, keys, step.table, step.starts, step.kv_lens, step.starts, step.kv_lens),
        *(None, AttentionOptions(0.2)),
    )
    torch.testing.assert_close(attended, full[..., :32], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_token_gets_the_same_bits_alone(cpu: hal.Backend, dtype: torch.dtype) -> None:
    step = Step(SEED)
    table, lens = torch.arange(60).view(3, 20).int(), torch.tensor([310, 1200, 65]).int()
    index, latents, ropes = (step.normal(60, 64, size).to(dtype) for size in (64, 96, 16))
    query, rope, keys = (step.normal(3, 6, size).to(dtype) for size in (96, 16, 64))
    weights, starts = step.normal(3, 6), torch.arange(4).int()
    select, attend = cpu.kernels["select_keys"], cpu.kernels["attend_selected"]
    together = select(keys, weights, index, table, starts, lens, 700)
    attended = attend(query, rope, latents, ropes, together, table, starts, 0.3)
    for one in range(3):
        at = slice(one, one + 1)
        alone = select(keys[at], weights[at], index, table[at], starts[:2], lens[at], 700)
        assert torch.equal(alone, together[at])
        result = attend(query[at], rope[at], latents, ropes, alone, table[at], starts[:2], 0.3)
        assert torch.equal(result, attended[at])


@pytest.mark.parametrize(
    ("budget", "group", "match"), [(0, 1, "budget 0"), (6, 4, "no multiple"), (4, 0, "groups of 0")]
)
def test_a_budget_that_selects_nothing_is_refused(kernels: Kernels, budget: int, group: int, match: str) -> None:
    one, cache = torch.ones(1, 1).int(), torch.ones(2, 4, 8)
    call = torch.ones(1, 2, 8), torch.ones(1, 2), cache, one, torch.tensor([0, 1]).int(), one[0]
    with pytest.raises(OperationError, match=match):
        kernels["select_keys"](*call, budget, group)


def test_what_is_outside_the_cache_is_refused(cpu: hal.Backend) -> None:
    one, cache, starts = torch.ones(1, 1).int(), torch.ones(2, 4, 8), torch.tensor([0, 1]).int()
    for table, length in ((2, 3), (-1, 1), (1, 5)):
        index = torch.ones(1, 2, 8), torch.ones(1, 2), cache, one * table, starts, one[0] * length
        with pytest.raises(OperationError, match=f"sequence 0 has {length} tokens"):
            cpu.kernels["select_keys"](*index, 1)
        query = torch.ones(1, 2, 8)
        with pytest.raises(OperationError, match="token 0 selects the positions"):
            cpu.kernels["attend_selected"](query, query, cache, cache, one * (length - 1), one * table, starts, 1.0)
