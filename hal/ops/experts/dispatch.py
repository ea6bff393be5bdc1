"""The exchange of rows between ranks that hold different experts.

Each rank of a group holds ``num_experts / size`` whole experts, consecutive and in the order of ranks. It dispatches
each of its tokens to the ranks with the token's experts, and combines what these experts return. Every rank has the
same number of tokens.

A rank reserves slots for each other one, as many as its tokens can need: ``tokens * min(top_k, num_experts / size)``.
So shapes do not depend on values, and loads may be uneven without a limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hal.device.group import SOLO, group
from hal.ops.collectives import all_to_all
from hal.ops.declaration.constraints import Draw, Sample
from hal.ops.declaration.dtypes import FLOATING
from hal.ops.declaration.operation import op
from hal.ops.experts.routing import ROUTINGS, WEIGHTS, expert_permute, expert_unpermute, routing

BASE = 256
"""The base of the two digits by which an expert travels with its row: bfloat16 holds all integers up to it."""


def to_digits(experts: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return numbers below ``BASE**2`` as two digits in a floating dtype, each of the shape of ``experts``."""
    return (experts // BASE).to(dtype), (experts % BASE).to(dtype)


def from_digits(high: Tensor, low: Tensor) -> Tensor:
    """Return the numbers, int32; see :func:`to_digits`."""
    return high.to(torch.int32) * BASE + low.to(torch.int32)


def slots_per_rank(tokens: int, top_k: int, local_experts: int) -> int:
    """Return the number of slots that a rank reserves for each rank: the most rows that it may send there."""
    return tokens * min(top_k, local_experts)


def dispatched(
    x: Tensor, experts: Tensor, num_experts: int, group: str, ranks: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what :func:`expert_dispatch` does, for a group of ``ranks`` ranks, with one :func:`hal.ops.all_to_all`."""
    tokens, top_k = experts.shape
    local = num_experts // ranks
    slots = slots_per_rank(tokens, top_k, local)
    assigned = experts.flatten().long()
    owner = assigned // local
    # Assignments fill the slots for their rank in order.
    before = (owner.unsqueeze(-1) == torch.arange(ranks, device=x.device)).long().cumsum(0)
    sent = owner * slots + before.gather(1, owner.unsqueeze(-1)).squeeze(-1) - 1
    token = torch.arange(tokens * top_k, device=x.device) // top_k
    free = torch.zeros(ranks * slots, dtype=torch.int64, device=x.device)
    # A slot without a row has the expert after the last one, so that its row is sorted to the end.
    kind = (free + local).index_copy(0, sent, assigned % local)
    rows = x.index_select(0, free.index_copy(0, sent, token))
    digits = to_digits(kind.unsqueeze(-1), x.dtype)
    received, *digits_received = all_to_all(torch.cat([rows, *digits], -1), group).split([x.shape[1], 1, 1], -1)
    sorted_rows, counts, places = expert_permute(received, from_digits(*digits_received), local + 1)
    return sorted_rows, counts[:local], sent.to(torch.int32), places


def _dispatch_samples(draw: Draw) -> Iterator[Sample]:
    for tokens, num_experts, top_k in ROUTINGS:
        yield draw.normal(tokens, 32 * top_k), routing(draw, tokens, num_experts, top_k), num_experts, SOLO.name
    yield draw.normal(9, 24), draw.integers(3, 4, 9, 1, dtype=torch.int32), 8, SOLO.name  # all to one expert


def _dispatched(shards: Sequence[Sample]) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    (tokens, top_k), num_experts, ranks = shards[0][1].shape, shards[0][2], len(shards)
    local = num_experts // ranks
    slots, found = slots_per_rank(tokens, top_k, local), []
    sent = [torch.zeros(tokens * top_k, dtype=torch.int32) for _ in shards]
    for rank in range(ranks):
        arrived = []
        for source, (x, experts, *_) in enumerate(shards):
            here = [(each, expert) for each, expert in enumerate(experts.flatten().tolist()) if expert // local == rank]
            for slot, (assignment, expert) in enumerate(here):
                sent[source][assignment] = rank * slots + slot
                arrived.append((expert % local, source * slots + slot, x[assignment // top_k]))
        arrived.sort(key=lambda each: each[:2])
        rows, places = shards[0][0].new_zeros(ranks * slots, shards[0][0].shape[1]), torch.zeros(ranks * slots)
        for row, (_, place, values) in enumerate(arrived):
            rows[row], places[place] = values, row
        counts = [sum(each[0] == expert for each in arrived) for expert in range(local)]
        found.append((rows, torch.tensor(counts), places.to(torch.int32)))
    return [(rows, counts, own, places) for (rows, counts, places), own in zip(found, sent, strict=True)]


@op(
    samples=_dispatch_samples,
    axes={
        "x": "tokens width",
        "experts": "tokens top_k",
        "return": ("capacity width", "local_experts", "slots", "places"),
    },
    dtypes={"x": FLOATING, "experts": torch.int32, "return": ("x", torch.int64, torch.int32, torch.int32)},
    rowwise=None,
    over_shards=_dispatched,
)
def expert_dispatch(x: Tensor, experts: Tensor, num_experts: int, group: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Send each token's row to the ranks of its experts, and return the rows for this rank's experts.

    In a group of one, the first two results are those of :func:`expert_permute`.

    Args:
        x: ``[tokens, width]``, floating, of the same shape and dtype on every rank.
        experts: ``[tokens, top_k]``, int32, from 0 to ``num_experts - 1``, distinct for a token.
        num_experts: the number of experts of all ranks, a multiple of the group's size, at most 65536.
        group: the name of the group; see :class:`hal.parallel.Group`.

    Returns:
        Four tensors. The rows, ``[size * tokens * min(top_k, num_experts / size), width]``, of x's dtype, sorted by
        expert, then by rank, then by token: as many as the counts add up to, and unspecified ones after them. The
        number of rows of each of this rank's experts, int64 ``[num_experts / size]``. Two int32 tensors for
        :func:`expert_combine` of the same backend, whose shapes and values depend on the kernel.
    """
    return dispatched(x, experts, num_experts, group, _size(group))


def combined(rows: Tensor, weights: Tensor, sent: Tensor, received: Tensor, group: str) -> Tensor:
    """Return what :func:`expert_combine` does for the results of :func:`dispatched`."""
    returned = all_to_all(rows.index_select(0, received.long()), group)
    own = returned.index_select(0, sent.long())
    return expert_unpermute(own, torch.arange(own.shape[0], dtype=torch.int32, device=rows.device), weights)


def _combine_samples(draw: Draw) -> Iterator[Sample]:
    for tokens, num_experts, top_k in ROUTINGS:
        used, more = tokens * top_k, min(tokens, 1)  # slots, and those and rows that are not used
        yield (
            draw.normal(used + 2 * more, 48 * top_k),
            routing(draw, tokens, num_experts, top_k),
            draw.normal(tokens, top_k).abs(),
            draw.permutation(used + more)[:used],
            draw.permutation(used + 2 * more)[: used + more],
            num_experts,
            SOLO.name,
        )


def _combined(shards: Sequence[Sample]) -> list[Tensor]:
    ranks, found = len(shards), []
    for rank, (_, _, weights, sent, *_) in enumerate(shards):
        parts = []
        for rows, _, _, _, received, *_ in shards:
            slots = received.shape[0] // ranks
            parts.append(rows[received.long()][rank * slots : (rank + 1) * slots])
        own = torch.cat(parts)[sent.long()].unflatten(0, weights.shape).float()
        found.append((own * weights.float().unsqueeze(-1)).sum(1).to(parts[0].dtype))
    return found


@op(
    samples=_combine_samples,
    axes={
        "rows": "capacity width",
        "experts": "tokens top_k",
        "weights": "tokens top_k",
        "sent": "slots",
        "received": "places",
        "return": "tokens width",
    },
    dtypes={
        "rows": FLOATING,
        "experts": torch.int32,
        "weights": WEIGHTS,
        "sent": torch.int32,
        "received": torch.int32,
        "return": "rows",
    },
    rowwise=None,
    over_shards=_combined,
)
def expert_combine(
    rows: Tensor, experts: Tensor, weights: Tensor, sent: Tensor, received: Tensor, num_experts: int, group: str
) -> Tensor:
    """Return the rows of :func:`expert_dispatch` to their tokens' ranks, and the weighted sum of each token's rows.

    Computed in float32, and rounded to the dtype of rows once. Unspecified rows do not affect the result.

    Args:
        rows: ``[capacity, width]``, floating: the results of this rank's experts, in the order of the dispatched rows.
        experts: ``[tokens, top_k]``, int32, as they were dispatched.
        weights: ``[tokens, top_k]``, of the dtype of rows, or float32.
        sent: the third result of :func:`expert_dispatch`.
        received: its fourth result.
        num_experts: the number of experts of all ranks.
        group: the name of the group.

    Returns:
        ``[tokens, width]``, of the dtype of rows.
    """
    return combined(rows, weights, sent, received, group)


def _size(name: str) -> int:
    return group(name).size
