"""Tests of attention to a window and to entries, and of routing by square roots of softplus, in float64."""

from __future__ import annotations

import random

import pytest
import torch
from helpers.paged_step import Step

from hal import ops
from hal.errors import OperationError

SEED = random.randrange(1 << 30)
ATTEND, ROUTE = (ops.operation(name).reference for name in ("attend_compressed", "softplus_route"))


@pytest.mark.parametrize("case", range(12))
@pytest.mark.parametrize("chosen", [True, False], ids=["chosen", "all"])
def test_a_token_reads_its_window_and_the_entries(case: int, chosen: bool) -> None:
    step = Step(SEED + case)
    group = step.random.choice([each for each in (1, 3, 4, 16) if step.block_size % each == 0])
    window, selected = step.random.choice((1, 4, 200)), step.random.choice((1, 6, 40))
    heads, dim = step.random.choice((1, 5)), step.random.choice((16, 40))
    rows = step.tokens + step.padding
    query, sinks, (latents, held) = step.normal(rows, heads, dim), step.normal(heads), step.cache(dim)
    entry_cache = torch.full((step.num_blocks, step.block_size // group, dim), float("nan"))
    entries, wanted, kept = torch.full((rows, selected), -1, dtype=torch.int32), torch.zeros_like(query), []
    for blocks, length in zip(step.table.long(), step.lens, strict=True):
        kept.append(step.normal(length // group, dim))
        for number, row in enumerate(kept[-1]):
            entry_cache[blocks[number * group // step.block_size], number % (step.block_size // group)] = row
    for token, (sequence, position) in enumerate(step.places):
        complete = (position + 1) // group
        taken = torch.arange(complete)
        if chosen:
            taken = torch.randperm(complete, generator=step.draw)[:selected].sort().values
            entries[token, : len(taken)] = taken.int()
        read = torch.cat((held[sequence][max(0, position + 1 - window) : position + 1], kept[sequence][taken].double()))
        scores = torch.cat((query[token].double() @ read.T * 0.1, sinks.double()[:, None]), -1)
        wanted[token] = (scores.softmax(-1)[:, :-1] @ read).float()
    lengths = step.table, step.starts, step.kv_lens
    found = ATTEND(query, latents, entry_cache, entries if chosen else None, sinks, *lengths, group, window, 0.1)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-6)


def test_entries_of_another_group_are_refused() -> None:
    lengths = torch.zeros(1, 2).int(), torch.tensor([0, 1]).int(), torch.tensor([1]).int()
    caches = torch.zeros(2, 8, 16), torch.zeros(2, 2, 16)
    with pytest.raises(OperationError, match="blocks of 8, and 2 entries in each for groups of 2"):
        ATTEND(torch.zeros(1, 3, 16), *caches, None, torch.zeros(3), *lengths, 2, 4, 0.1)
    with pytest.raises(OperationError, match="a window of 0 tokens"):
        ATTEND(torch.zeros(1, 3, 16), *caches, None, torch.zeros(3), *lengths, 4, 0, 0.1)


def test_experts_have_the_highest_scores_or_are_those_of_a_table() -> None:
    draw = torch.Generator().manual_seed(SEED)
    logits, bias = torch.randn(9, 12, generator=draw), torch.randn(12, generator=draw)
    scores = torch.log1p(logits.double().exp()).sqrt()
    table = torch.rand(9, 12, generator=draw).argsort(1)[:, :4].int()
    for given, chosen, wanted in (
        (None, None, scores.argsort(descending=True)[:, :4]),
        (bias, None, (scores + bias).argsort(descending=True)[:, :4]),
        (None, table, table.long()),
    ):
        weights, experts = ROUTE(logits, given, chosen, 4, 1.5)
        assert torch.equal(experts.long(), wanted)
        best = scores.gather(1, wanted)
        torch.testing.assert_close(weights, (1.5 * best / best.sum(1, keepdim=True)).float(), rtol=1e-5, atol=1e-6)
