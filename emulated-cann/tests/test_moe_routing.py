"""Routing of mixtures of experts on the emulated CANN, through the real torch_npu, against references in Python.

What is refused is in test_moe_refusals.py, which generation takes what in test_moe_generations.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_npu
from helpers.thorough import DTYPE, EXHAUSTIVE, thorough
from support.fused_draw import (
    FLOATS,
    HALVES,
    Draw,
    Near,
    Pairs,
    Rounded,
    Same,
    case,
    check,
    optional,
    parameters,
)
from support.routing_references import KINDS, choices, combined, route, whole_order
from torch import Tensor

EXPERTS = 8


def scores(draw: Draw, *shape: int) -> Tensor:
    """Of few values, so that many are equal."""
    return draw.integers(-6, 6, *shape, dtype=torch.int32).to(draw.dtype) / 2


def first_largest(values: Tensor, k: int) -> Tensor:
    """The indices of the k largest of each row, the lower index first among equals."""
    rows = values.flatten(0, -2).tolist()
    best = [sorted(range(len(row)), key=lambda i, row=row: (-row[i], i))[:k] for row in rows]
    return torch.tensor(best, dtype=torch.int32).view(*values.shape[:-1], k)


@case(*FLOATS, dims=(2, 3), k=(1, 3, 8), finished=(False, True))
def gating_softmax(draw: Draw, dims: int, k: int, finished: bool) -> Pairs:
    x = scores(draw, *[draw.between(1, 5) for _ in range(dims - 1)], EXPERTS)
    done = draw.integers(0, 1, *x.shape[:-1], dtype=torch.int32).bool() if finished else None
    y, experts, rows = torch_npu.npu_moe_gating_top_k_softmax(draw.strided(x), optional(done), k)
    chosen = first_largest(x, k)
    expected = chosen if done is None else torch.where(done.unsqueeze(-1), EXPERTS, chosen)
    yield y, Near(x.double().softmax(-1).gather(-1, chosen.long()))
    yield experts, Same(expected.int())
    tokens = chosen.numel() // k
    yield rows.flatten(0, -2), Same(torch.tensor([[j * tokens + i for j in range(k)] for i in range(tokens)]).int())
    y, experts, softmax = torch_npu.npu_moe_gating_top_k_softmax_v2(
        draw.strided(x), k=k, finished=optional(done), renorm=0, output_softmax=True
    )
    yield y, Near(x.double().softmax(-1).gather(-1, chosen.long()))
    yield experts, Same(expected.int())
    yield softmax, Near(x.double().softmax(-1))
    y, experts, _ = torch_npu.npu_moe_gating_top_k_softmax_v2(draw.strided(x), k=k, finished=optional(done), renorm=1)
    yield y, Near(x.double().gather(-1, chosen.long()).softmax(-1))
    yield experts, Same(expected.int())


@case(*FLOATS, norm=(0, 1), groups=(1, 4), mode=(0, 1), biased=(False, True), renorm=(0, 1))
def gating(draw: Draw, norm: int, groups: int, mode: int, biased: bool, renorm: int) -> Pairs:
    x = scores(draw, draw.between(1, 6), EXPERTS)
    bias = scores(draw, EXPERTS) if biased else None
    kept, k, factor = (2, draw.between(1, 4), 2.5) if groups > 1 else (1, draw.between(1, EXPERTS), 1.0)
    y, experts, normalised = torch_npu.npu_moe_gating_top_k(
        draw.strided(x),
        k,
        bias=optional(bias),
        k_group=kept,
        group_count=groups,
        group_select_mode=mode,
        renorm=renorm,
        norm_type=norm,
        out_flag=True,
        routed_scaling_factor=factor,
        eps=1e-20,
    )
    exact = x.float().sigmoid() if norm else x.float().softmax(-1)
    values = exact if bias is None else exact + bias.float()
    grouped = values.view(len(x), groups, -1)
    of_groups = grouped.amax(-1) if mode == 0 else grouped.topk(2).values.sum(-1)
    taken = torch.zeros(len(x), groups, dtype=torch.bool).scatter(1, first_largest(of_groups, kept).long(), True)
    if groups > 1:
        values = grouped.masked_fill(~taken.unsqueeze(-1), -torch.inf).view_as(values)
    chosen = first_largest(values, k)
    weights = exact.double().gather(1, chosen.long())
    if norm or renorm:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    yield experts, Same(chosen)
    yield y, Near(weights * factor)
    yield normalised, Near(exact.double())


def limits(draw: Draw, ranged: bool) -> tuple[int, int]:
    return (draw.between(1, 3), draw.between(5, EXPERTS)) if ranged else (0, EXPERTS)


def init_routing(x: Tensor, expert_idx: Tensor, **options: Any) -> Any:
    defaults = {
        "active_num": expert_idx.numel(),
        "expert_num": EXPERTS,
        "expert_tokens_num_type": 1,
        "expert_tokens_num_flag": True,
        "active_expert_range": [0, EXPERTS],
    }
    return torch_npu.npu_moe_init_routing_v2(x, expert_idx.npu(), **{**defaults, **options})


@case(*FLOATS, torch.int8, kind=KINDS, ranged=(False, True), index=(0, 1))
def plain_routing(draw: Draw, kind: str, ranged: bool, index: int) -> Pairs:
    expert_idx = choices(draw, kind, EXPERTS, 3)
    (tokens, k), (first, end) = expert_idx.shape, limits(draw, ranged)
    x = draw.integers(-128, 127, tokens, 16, dtype=torch.int32).to(draw.dtype)
    scale = draw.positive(tokens, dtype=torch.float32)
    routed = route(expert_idx, first, end)
    expected = {
        0: torch.tensor(routed.counts).cumsum(0),
        1: torch.tensor(routed.counts),
        2: routed.pairs(first, EXPERTS),
    }
    for count_type, counts in expected.items():
        rows, places, numbers, scales = init_routing(
            draw.strided(x),
            expert_idx,
            scale=scale.npu(),
            active_expert_range=[first, end],
            expert_tokens_num_type=count_type,
            row_idx_type=index,
        )
        yield numbers, Same(counts)
        if index == 0:
            yield places, Same(routed.gather_index(tokens * k))
        else:
            yield places, Same(whole_order(expert_idx, first))
            yield places[: routed.active], Same(torch.tensor(routed.order, dtype=torch.int32))
        if routed.active:
            yield rows[: routed.active], Same(routed.rows(x, k))
            yield scales[: routed.active], Same(routed.rows(scale.unsqueeze(1), k).squeeze(1))


@case(*FLOATS, kind=KINDS, ranged=(False, True), smooth=(None, 1, EXPERTS))
def quantised_routing(draw: Draw, kind: str, ranged: bool, smooth: int | None) -> Pairs:
    expert_idx = choices(draw, kind, EXPERTS, 3)
    (tokens, k), (first, end) = expert_idx.shape, limits(draw, ranged)
    x, routed = draw.normal(tokens, 32), route(expert_idx, first, end)
    options = {"active_expert_range": [first, end], "active_num": -1}
    scale, offset = draw.positive(1, dtype=torch.float32) * 30, draw.normal(1, dtype=torch.float32)
    rows, *_ = init_routing(
        draw.strided(x), expert_idx, quant_mode=0, scale=scale.npu(), offset=offset.npu(), **options
    )
    yield rows[:0], Same(torch.empty(0, 32, dtype=torch.int8))
    if routed.active:
        yield rows[: routed.active], Rounded(routed.rows(x, k).double() * scale.double() + offset.double())

    factors = None if smooth is None else draw.positive(1 if smooth == 1 else end - first, 32, dtype=torch.float32)
    rows, places, numbers, scales = init_routing(
        draw.strided(x), expert_idx, quant_mode=1, scale=optional(factors), **options
    )
    yield places, Same(routed.gather_index(tokens * k))
    yield numbers, Same(torch.tensor(routed.counts))
    if routed.active:
        exact = routed.rows(x, k).double()
        if factors is not None:
            of_row = [0 if smooth == 1 else int(expert_idx.flatten()[place]) - first for place in routed.order]
            exact = exact * factors[of_row].double()
        expected = exact.abs().amax(-1) / 127
        yield scales[: routed.active], Near(expected)
        yield rows[: routed.active], Rounded(exact / expected.unsqueeze(1))


@case(*HALVES, kind=KINDS, mode=(-1, 0, 1))
def padded_routing(draw: Draw, kind: str, mode: int) -> Pairs:
    expert_idx = choices(draw, kind, EXPERTS, 3)
    tokens, k = expert_idx.shape
    x, capacity = draw.normal(tokens, 16), draw.between(1, tokens)
    routed = route(expert_idx, 0, EXPERTS, capacity)
    scale = {0: draw.positive(1, dtype=torch.float32) * 30, -1: None, 1: None}[mode]
    extra = {} if scale is None else {"scale": scale.npu(), "offset": torch.zeros(1).npu()}
    rows, places, numbers, scales = init_routing(
        draw.strided(x), expert_idx, drop_pad_mode=1, expert_capacity=capacity, quant_mode=mode, **extra
    )
    assert rows.shape == (EXPERTS, capacity, 16)
    yield places, Same(routed.gather_index(tokens * k))
    yield numbers, Same(torch.tensor(routed.counts))
    expected = routed.rows(x, k)
    if mode == -1:
        yield rows.flatten(0, 1), Same(expected)
    elif scale is not None:
        yield rows.flatten(0, 1), Rounded(expected.double() * scale.double())
    else:
        found = expected.double().abs().amax(-1) / 127
        yield scales, Near(found)
        yield rows.flatten(0, 1), Rounded((expected.double() / found.unsqueeze(1)).nan_to_num(0))


@case(torch.bfloat16, kept=(1, 5, 1000))
def limited_routing(draw: Draw, kept: int) -> Pairs:
    """active_num limits the rows, and not what expanded_row_idx says."""
    expert_idx = choices(draw, "random", EXPERTS, 3)
    (tokens, k), routed = expert_idx.shape, route(expert_idx, 0, EXPERTS)
    x = draw.normal(tokens, 16)
    rows, places, _, _ = init_routing(x.npu(), expert_idx, active_num=kept)
    assert len(rows) == min(kept, tokens * k)
    yield rows, Same(routed.rows(x, k)[:kept])
    yield places, Same(routed.gather_index(tokens * k))


@case(*FLOATS, kind=KINDS, whole=(True, False))
def first_routing(draw: Draw, kind: str, whole: bool) -> Pairs:
    """The form whose row_idx lies by choice, then by token."""
    expert_idx = choices(draw, kind, EXPERTS, 3)
    tokens, k = expert_idx.shape
    x, routed = draw.normal(tokens, 16), route(expert_idx, 0, EXPERTS)
    row_idx = torch.arange(tokens * k, dtype=torch.int32).view(k, tokens).t().contiguous()
    active = tokens if whole else 1
    rows, places, experts = torch_npu.npu_moe_init_routing(draw.strided(x), row_idx.npu(), expert_idx.npu(), active)
    yield rows, Same(routed.rows(x, k)[: active * k])
    yield experts, Same(torch.tensor([int(expert_idx.flatten()[place]) for place in routed.order]).int())
    by_token = places.cpu().view(k, tokens).t().flatten()
    yield by_token, Same(routed.gather_index(tokens * k))
    ends = torch_npu.npu_moe_compute_expert_tokens(experts, EXPERTS)
    yield ends, Same(torch.tensor(routed.counts).cumsum(0).int())
    beyond = torch.cat([experts.cpu(), torch.tensor([EXPERTS], dtype=torch.int32)])
    yield torch_npu.npu_moe_compute_expert_tokens(beyond.npu(), EXPERTS), Same(ends.cpu())


@case(*FLOATS, kind=KINDS, mode=(0, 1), smooth=(None, 1, EXPERTS), padded=(False, True))
def quantising_routing(draw: Draw, kind: str, mode: int, smooth: int | None, padded: bool) -> Pairs:
    expert_idx = choices(draw, kind, EXPERTS, 3)
    (tokens, k), x = expert_idx.shape, draw.normal(expert_idx.shape[0], 16)
    capacity = draw.between(1, tokens) if padded else None
    routed = route(expert_idx, 0, EXPERTS, capacity)
    scale = draw.positive(1, dtype=torch.float32) * 30 if mode == 0 else None
    if mode == 1 and smooth is not None:
        scale = draw.positive(smooth, 16, dtype=torch.float32)
    rows, places, counts, before, scales = torch_npu.npu_moe_init_routing_quant(
        draw.strided(x),
        expert_idx.npu(),
        scale=optional(scale),
        offset=torch.ones(1).npu() if mode == 0 else None,
        active_num=0,
        expert_capacity=capacity or 0,
        expert_num=EXPERTS,
        drop_pad_mode=int(padded),
        expert_tokens_num_mode=draw.between(1, 2) if not padded else 0,
        expert_tokens_before_capacity_flag=padded,
        quant_mode=mode,
    )
    yield places, Same(routed.gather_index(tokens * k))
    found = (before if padded else counts).cpu()
    each = torch.tensor(routed.counts).int()
    assert torch.equal(found, each) or (not padded and torch.equal(found, each.cumsum(0).int()))
    exact = routed.rows(x, k).double()
    if mode == 0:
        filled = torch.tensor([place >= 0 for place in routed.order]).unsqueeze(1)
        yield rows.flatten(0, -2), Rounded(torch.where(filled, exact * float(scale) + 1, 0))  # type: ignore[arg-type]
        return
    if scale is not None:
        of_row = [0 if smooth == 1 else int(expert_idx.flatten()[place]) for place in routed.order]
        exact = exact * scale[of_row].double()
    expected = exact.abs().amax(-1) / 127
    yield scales, Near(expected)
    yield rows.flatten(0, -2), Rounded((exact / expected.unsqueeze(1)).nan_to_num(0))


@case(*FLOATS, kind=KINDS, mode=(0, 1, 2, 3), weights=(None, "same", "float"), biased=(False, True))
def finalising(draw: Draw, kind: str, mode: int, weights: str | None, biased: bool) -> Pairs:
    expert_idx = choices(draw, kind, EXPERTS, 3)
    tokens, k = expert_idx.shape
    padded = mode in (1, 3)
    capacity = draw.between(1, tokens) if padded else None
    index = route(expert_idx, 0, EXPERTS, capacity).gather_index(tokens * k)
    rows = draw.normal(EXPERTS * capacity if capacity else tokens * k, 16)
    wide = weights == "float" and draw.dtype == torch.bfloat16
    scales = None if weights is None else draw.normal(tokens, k, dtype=torch.float32 if wide else draw.dtype)
    bias = draw.normal(EXPERTS, 16) if biased else None
    skips = [draw.normal(tokens, 16) if draw.below(2) or i == 0 else None for i in range(2)] if biased else [None, None]
    given = index if mode >= 2 else index.view(tokens, k).t().flatten()
    y = torch_npu.npu_moe_finalize_routing(
        draw.strided(rows).unflatten(0, (EXPERTS, -1)) if padded else draw.strided(rows),
        *map(optional, (*skips, bias, scales)),
        given.npu(),
        expert_idx.npu(),
        mode,
        k,
    )
    expected = combined(rows, index, scales, k, bias, expert_idx)
    yield y, Near(expected + sum(each.double() for each in skips if each is not None), 4)


@case(*FLOATS, kind=KINDS, kept=(None, 4, -2), flat=(False, True))
def permuting(draw: Draw, kind: str, kept: int | None, flat: bool) -> Pairs:
    expert_idx = choices(draw, kind, EXPERTS, 1 if flat else 3)
    tokens, k = expert_idx.shape
    x, routed = draw.normal(tokens, 16), route(expert_idx, 0, EXPERTS)
    if kept is not None and tokens * k + min(kept, 0) <= 0:
        kept = None
    indices = expert_idx.to(draw.choice([torch.int32, torch.int64]))
    rows, places = torch_npu.npu_moe_token_permute(draw.strided(x), (indices[:, 0] if flat else indices).npu(), kept)
    end = tokens * k if kept is None else kept
    index = routed.gather_index(tokens * k)
    yield rows, Same(routed.rows(x, k)[:end])
    yield places, Same(index)
    probs = draw.normal(tokens, k, dtype=draw.choice(FLOATS))
    y = torch_npu.npu_moe_token_unpermute(rows, places, probs.npu())
    left = torch.where(index < len(rows), index, -1)  # a row that was cut off counts as zeros
    yield y, Near(combined(rows.cpu(), left, probs, k, None, None), 4)
    if k == 1:
        yield (
            torch_npu.npu_moe_token_unpermute(rows, places),
            Same(combined(rows.cpu(), left, None, 1, None, None).to(draw.dtype)),
        )


@case(*HALVES, torch.int8, scaled=(False, True), kind=(torch.int32, torch.int64))
def re_routing(draw: Draw, scaled: bool, kind: torch.dtype) -> Pairs:
    counts = draw.integers(0, 3, 3, 4, dtype=kind)
    counts[1, 2], counts[:, 3] = 2, 0
    tokens = int(counts.sum())
    x = draw.integers(-100, 100, tokens, 16, dtype=torch.int32).to(draw.dtype)
    scales = draw.positive(tokens, dtype=torch.float32) if scaled else None
    y, permuted, index, totals = torch_npu.npu_moe_re_routing(x.npu(), counts.npu(), per_token_scales=optional(scales))
    starts = counts.flatten().cumsum(0) - counts.flatten()
    order = [
        int(starts[rank * 4 + expert]) + i
        for expert in range(4)
        for rank in range(3)
        for i in range(int(counts[rank, expert]))
    ]
    yield y, Same(x[order])
    yield index, Same(torch.tensor(order, dtype=torch.int32))
    yield totals, Same(counts.sum(0).to(kind))
    if scales is not None:
        yield permuted, Same(scales[order])


@thorough(EXHAUSTIVE, r"seed[1-9]")
@thorough(DTYPE, r"-float32-|-float16-")
@pytest.mark.parametrize(("run", "arguments", "dtype", "seed"), list(parameters(__name__)))
def test_operation(run: Callable[..., Pairs], arguments: dict[str, Any], dtype: torch.dtype, seed: int) -> None:
    check(run, arguments, dtype, seed)


@pytest.mark.parametrize("quant_mode", [-1, 1])
def test_a_captured_block_follows_its_inputs(quant_mode: int) -> None:
    """Gating, routing and combination in one graph, replayed with other scores: all tokens to one expert, too."""
    generator = torch.Generator().manual_seed(1)
    tokens, k, width = 6, 2, 16
    x, logits = torch.zeros(tokens, width).half().npu(), torch.zeros(tokens, EXPERTS).half().npu()

    def block() -> tuple[Tensor, Tensor, Tensor]:
        weights, experts, _ = torch_npu.npu_moe_gating_top_k(logits, k, renorm=1)
        rows, places, counts, scales = torch_npu.npu_moe_init_routing_v2(
            x,
            experts,
            active_num=tokens * k,
            expert_num=EXPERTS,
            expert_tokens_num_type=1,
            expert_tokens_num_flag=True,
            quant_mode=quant_mode,
            active_expert_range=[0, EXPERTS],
        )
        if quant_mode == 1:
            rows = (rows.float() * scales.unsqueeze(1)).half()
        y = torch_npu.npu_moe_finalize_routing(rows, None, None, None, weights, places, experts, 2)
        return y, counts, experts

    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        y, counts, experts = block()
    seen = []
    for replay in range(4):
        new_x = torch.randn(tokens, width, generator=generator).half()
        new_logits = torch.randn(tokens, EXPERTS, generator=generator).half()
        if replay == 3:
            new_logits[:, 2:4] += 20
        x.copy_(new_x.npu())
        logits.copy_(new_logits.npu())
        graph.replay()
        # The weights add up to 1, and every expert returns its input: so does the block.
        torch.testing.assert_close(y.cpu(), new_x, rtol=2e-3, atol=0.03 if quant_mode == 1 else 2e-3)
        chosen = new_logits.float().topk(k).indices
        assert torch.equal(experts.cpu().long().sort(-1).values, chosen.sort(-1).values)
        assert counts.tolist() == [int((chosen == expert).sum()) for expert in range(EXPERTS)]
        seen.append(tuple(counts.tolist()))
    assert len(set(seen)) == 4
    assert seen[3] == (0, 0, tokens, tokens, 0, 0, 0, 0)
