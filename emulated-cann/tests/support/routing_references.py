"""What the routing of a mixture of experts gives, choice by choice in Python, and the choices that tests route."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from .fused_draw import Draw

KINDS = ("random", "gaps", "one_expert", "one_token")


def choices(draw: Draw, kind: str, experts: int, k: int) -> Tensor:
    """Draw expert_idx, int32 [tokens, k], without an expert twice for a token."""
    tokens = 1 if kind == "one_token" else draw.between(2, 9)
    if kind == "one_expert":
        return torch.full((tokens, 1), draw.below(experts), dtype=torch.int32)
    allowed = torch.arange(experts)[:: 2 if kind == "gaps" else 1]
    k = min(k, len(allowed))
    return torch.stack([allowed[draw.permutation(len(allowed))[:k]] for _ in range(tokens)]).int()


def whole_order(expert_idx: Tensor, first: int) -> Tensor:
    """Return all choices by expert, as places in the flat expert_idx; those of experts before `first` come last."""
    flat = expert_idx.flatten().tolist()
    order = sorted(range(len(flat)), key=lambda place: (flat[place] < first, max(flat[place], first)))
    return torch.tensor(order, dtype=torch.int32)


@attrs.frozen
class Routed:
    """Where each choice goes.

    Attributes:
        order: of each row: the choice, as its place in the flat expert_idx. Padded: -1 where a slot is empty.
        counts: of each expert of the range, before any is dropped.
        active: the number of choices in the range.
    """

    order: list[int]
    counts: list[int]
    active: int

    def rows(self, x: Tensor, k: int) -> Tensor:
        """The rows of x by the order; zeros in an empty slot."""
        return torch.stack([x[place // k] if place >= 0 else torch.zeros_like(x[0]) for place in self.order])

    def gather_index(self, choices: int) -> Tensor:
        index = torch.full((choices,), -1, dtype=torch.int32)
        for row, place in enumerate(self.order):
            if place >= 0:
                index[place] = row
        return index

    def pairs(self, first: int, experts: int) -> Tensor:
        found = [[first + expert, count] for expert, count in enumerate(self.counts) if count]
        return torch.tensor(found + [[0, 0]] * (experts - len(found)))


def route(expert_idx: Tensor, first: int, end: int, capacity: int | None = None) -> Routed:
    """Route expert by expert, and within an expert token by token."""
    flat = expert_idx.flatten().tolist()
    of_expert = [[place for place, chosen in enumerate(flat) if chosen == expert] for expert in range(first, end)]
    counts = [len(places) for places in of_expert]
    if capacity is not None:
        of_expert = [(places + [-1] * capacity)[:capacity] for places in of_expert]
    return Routed([place for places in of_expert for place in places], counts, sum(counts))


def combined(
    rows: Tensor, index: Tensor, scales: Tensor | None, k: int, bias: Tensor | None, experts: Tensor | None
) -> Tensor:
    """The weighted sums, [tokens, H] in float64, by an index that has all choices of a token beside each other."""
    tokens = len(index) // k
    sums = torch.zeros(tokens, rows.shape[1], dtype=torch.float64)
    for token in range(tokens):
        for choice in range(k):
            place = int(index[token * k + choice])
            value = rows[place].double() if place >= 0 else torch.zeros(rows.shape[1], dtype=torch.float64)
            if bias is not None:
                assert experts is not None
                value = value + bias[int(experts[token, choice])].double()
            sums[token] += value if scales is None else value * scales[token, choice].double()
    return sums
