"""Tests of attention to selected blocks against loops in float64."""

from __future__ import annotations

import random

import pytest
import torch
from helpers.paged_step import Step
from torch import Tensor

from hal import ops
from hal.errors import OperationError

SEED = random.randrange(1 << 30)
SELECT, ATTEND = (ops.operation(name).reference for name in ("select_blocks", "attend_chosen"))


@pytest.mark.parametrize("case", range(10))
def test_the_last_blocks_and_those_with_the_highest_scores_are_selected(case: int) -> None:
    step = Step(SEED + case)
    heads, dim, group = (step.random.choice(each) for each in ((1, 3), (16, 24), (1, 4, 30)))
    top = step.random.choice((1, 3, 8))
    local = step.random.randint(0, min(top, 3))
    query = step.normal(step.tokens + step.padding, heads, dim)
    cache, keys = step.cache(dim)
    found = SELECT(query, cache, step.table, step.starts, step.kv_lens, top, group, local)
    assert found.shape == (step.tokens + step.padding, heads, top * group)
    assert (found[step.tokens :] == -1).all()
    for token, (sequence, position) in enumerate(step.places):
        scores = query[token].double() @ keys[sequence][: position + 1].T  # [heads, positions]
        blocks = [each.amax(-1) for each in scores.split(group, -1)]
        forced = range(max(0, len(blocks) - local), len(blocks))
        for head in range(heads):
            row = found[token, head].tolist()
            chosen = row[: row.index(-1)] if -1 in row else row
            assert set(row[len(chosen) :]) <= {-1}
            taken = sorted({each // group for each in chosen})
            assert chosen == [each for each in range(position + 1) if each // group in taken]
            assert len(taken) == min(top, len(blocks))
            assert set(forced) <= set(taken)
            free = [float(blocks[each][head]) for each in taken if each not in forced]
            left = [float(each[head]) for number, each in enumerate(blocks) if number not in taken]
            if free and left:  # within the rounding of float32
                assert min(free) >= max(left) - 1e-5 * float(scores.abs().max())


def test_of_equal_scores_the_lower_block_is_selected() -> None:
    cache = torch.tensor([1.0, 3, 0, 3, 3, 2, 1, 1]).view(1, 8, 1)
    call = torch.ones(1, 1, 1), cache, torch.zeros(1, 1).int(), torch.tensor([0, 1]).int(), torch.tensor([8]).int()
    assert SELECT(*call, 2, 2, 0).tolist() == [[[0, 1, 2, 3]]]
    assert SELECT(*call, 2, 2, 1).tolist() == [[[0, 1, 6, 7]]]
    cache[0, 5] = float("nan")  # shows in the attention
    assert SELECT(*call, 1, 2, 0).tolist() == [[[4, 5]]]


@pytest.mark.parametrize("case", range(10))
def test_each_group_of_key_heads_reads_its_choice(case: int) -> None:
    step = Step(SEED + case)
    choices, each, dim = (step.random.choice(values) for values in ((1, 2, 3), (1, 2), (16, 40)))
    kv_heads, count = choices * step.random.choice((1, 2)), step.random.choice((1, 7, 90))
    query = step.normal(step.tokens + step.padding, kv_heads * each, dim)
    (keys, held), (values, kept) = step.cache(kv_heads, dim), step.cache(kv_heads, dim)
    positions = torch.full((step.tokens + step.padding, choices, count), -1, dtype=torch.int32)
    wanted: Tensor = torch.zeros_like(query)
    for token, (sequence, position) in enumerate(step.places):
        for head in range(kv_heads * each):
            choice, kv_head = head * choices // (kv_heads * each), head // each
            if positions[token, choice, 0] < 0:
                chosen = torch.randperm(position + 1, generator=step.draw)[:count].sort().values
                positions[token, choice, : len(chosen)] = chosen.int()
            at = positions[token, choice]
            at = at[at >= 0].long()
            scores = held[sequence][at, kv_head] @ query[token, head].double() * 0.3
            wanted[token, head] = (scores.softmax(-1) @ kept[sequence][at, kv_head]).float()
    found = ATTEND(query, keys, values, positions, step.table, step.starts, 0.3)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(("top", "group", "local"), [(0, 4, 0), (2, 0, 0), (2, 4, 3), (2, 4, -1)])
def test_numbers_out_of_range_are_refused(top: int, group: int, local: int) -> None:
    one, cache = torch.ones(1, 1).int(), torch.ones(2, 4, 8)
    with pytest.raises(OperationError, match=f"selects {top} blocks of {group} positions, with the last {local}"):
        SELECT(torch.ones(1, 2, 8), cache, one, torch.tensor([0, 1]).int(), one[0], top, group, local)


@pytest.mark.parametrize(("heads", "choices"), [(4, 3), (3, 1)])
def test_choices_that_do_not_divide_the_heads_are_refused(heads: int, choices: int) -> None:
    one, cache = torch.ones(1, 1).int(), torch.ones(2, 4, 2, 8)
    positions = torch.zeros(1, choices, 1).int()
    with pytest.raises(OperationError, match=f"{choices} choices for 2 key heads and {heads} heads"):
        ATTEND(torch.ones(1, heads, 8), cache, cache, positions, one, torch.tensor([0, 1]).int(), 1.0)
