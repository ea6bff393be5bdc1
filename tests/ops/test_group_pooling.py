"""Tests of the pooling of groups against whole sequences, in steps that cut groups and whose sequences change."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from hal import ops
from hal.errors import OperationError

SEED = random.randrange(1 << 30)
POOL = ops.operation("pool_groups").reference
TEXTS = 7
SAVES = 3
SLOTS = 1 + TEXTS * (1 + SAVES)


def whole(rows: Tensor, gates: Tensor | None, bias: Tensor, group: int, span: int) -> Tensor:
    """Return the pooled rows of a sequence, ``[groups, dim]``, in float64."""
    dim, found = rows.shape[1] // span, []
    for first in range(0, len(rows) - group + 1, group):
        values, logits = [], []
        for part in range(span):
            begin = first - (span - 1 - part) * group
            if begin >= 0:
                of = slice(begin, begin + group), slice(part * dim, (part + 1) * dim)
                values.append(rows[of].double())
                logits.append(0 * values[-1] if gates is None else (gates[of] + bias[:, of[1]]).double())
        found.append((torch.cat(logits).softmax(0) * torch.cat(values)).sum(0))
    return torch.stack(found) if found else rows.new_zeros(0, dim).double()


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("group", "span"), [(1, 1), (4, 1), (5, 2), (16, 1), (3, 3)])
def test_steps_pool_what_whole_sequences_do(group: int, span: int, gated: bool) -> None:
    print(f"seed {SEED}")  # noqa: T201 - pytest prints it with a failure
    draw, choose = torch.Generator().manual_seed(SEED), random.Random(SEED)
    features = span * 8
    bias = torch.randn(group, features, generator=draw)
    lengths = [choose.randint(1, 90) for _ in range(TEXTS)]
    texts = [torch.randn(length, 2 * features, generator=draw) for length in lengths]
    wanted = [whole(each[:, :features], each[:, features:] if gated else None, bias, group, span) for each in texts]
    tail = torch.full((SLOTS, span * group, features * (2 if gated else 1)), float("nan"))
    free = choose.sample(range(1, SLOTS), SLOTS - 1)
    slots, done = [free.pop() for _ in texts], [0] * len(lengths)
    while done != lengths:
        left = [each for each in range(len(lengths)) if done[each] < lengths[each]]
        chosen = choose.sample(left, choose.randint(1, len(left)))
        new = [choose.randint(1, min(lengths[each] - done[each], choose.choice((1, 7, 40)))) for each in chosen]
        padding, empty = choose.choice((0, 3)), choose.choice((0, 1, 2))
        rows = [texts[each][done[each] : done[each] + count] for each, count in zip(chosen, new, strict=True)]
        rows.append(torch.full((padding + empty, 2 * features), float("nan")))
        x, gate = torch.cat(rows).split(features, 1)
        starts = torch.tensor([0, *new, *[1] * empty]).cumsum(0).int()  # padding sequences have a token and no length
        ends = [done[each] + count for each, count in zip(chosen, new, strict=True)]
        lens = torch.tensor([*ends, *[0] * empty]).int()
        used = torch.tensor([*(slots[each] for each in chosen), *[0] * empty]).int()
        saves = choose.randint(0, SAVES)  # A step that keeps the states after its last tokens may be rolled back.
        write = [[free.pop() for _ in range(saves)] for _ in chosen] if saves else [[slots[each]] for each in chosen]
        written = torch.tensor(write + [[0] * max(saves, 1)] * empty).int() if saves else None
        before, given = tail.clone(), (gate, bias) if gated else (None, None)
        found = POOL(x, *given, tail, used, written, starts, lens, group, span)
        assert (found[sum(new) :] == 0).all()
        unused = [each for each in range(1, SLOTS) if not any(each in own for own in write)]
        torch.testing.assert_close(tail[unused], before[unused], rtol=0, atol=0, equal_nan=True)
        for each, count, first, own in zip(chosen, new, starts.tolist(), write, strict=False):
            for at in range(count):
                row, complete = found[first + at].double(), done[each] + at + 1
                if complete % group:
                    assert (row == 0).all()
                else:
                    torch.testing.assert_close(row, wanted[each][complete // group - 1], rtol=1e-5, atol=1e-6)
            dropped = choose.randrange(min(count, len(own)))
            done[each] += count - dropped
            kept = own[len(own) - 1 - dropped]
            free += [slot for slot in {slots[each], *own} if slot != kept]
            slots[each] = kept


def test_rows_of_another_size_and_a_bias_without_a_gate_are_refused() -> None:
    x, one, starts = torch.ones(1, 8), torch.ones(1).int(), torch.tensor([0, 1]).int()
    with pytest.raises(OperationError, match="rows of 8 features without a gate, no bias, and a tail with rows of 16"):
        POOL(x, None, None, torch.ones(2, 4, 16), one, None, starts, one, 4)
    with pytest.raises(OperationError, match="without a gate, a bias"):
        POOL(x, None, torch.ones(4, 8), torch.ones(2, 4, 8), one, None, starts, one, 4)
