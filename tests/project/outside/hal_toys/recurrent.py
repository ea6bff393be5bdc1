"""(b) A recurrent matrix and a convolution window per sequence, beside a layer of ordinary attention."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from hal import ops
from hal.nn import Linear, RMSNorm
from hal.nn.model import LayerState
from hal.ops import FLOATING, Draw, Sample
from hal.step import SEQUENCE, SlotBatch, State

from .model import AttentionLayer, ToyLM

LAGS = 3
"""Rows that a convolution reads: a token's own, and those of the two tokens before it."""


def _steps(draw: Draw) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """Yield the queries of each sequence, its slot and start."""
    for queries in ([1], [4, 1, 2], [1, 1, 1], [3, 5]):
        starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32).to(draw.device)
        yield queries, (1 + draw.permutation(5)[: len(queries)]).to(torch.int32), starts


def _owners(tokens: int, query_start_loc: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sequence of each token, and its index among the sequence's new tokens."""
    token = torch.arange(tokens, device=query_start_loc.device)
    starts = query_start_loc.long()
    owner = torch.searchsorted(starts[1:], token, right=True).clamp(max=query_start_loc.shape[0] - 2)
    return owner, token - starts[owner]


def _conv_samples(draw: Draw) -> Iterator[Sample]:
    for index, (queries, slots, starts) in enumerate(_steps(draw)):
        width = (16, 32)[index % 2]
        yield (
            draw.normal(sum(queries), width),
            draw.normal(LAGS, width),
            draw.normal(6, LAGS - 1, width),
            slots,
            starts,
        )


@ops.op(
    samples=_conv_samples,
    axes={
        "x": "tokens width",
        "weight": "lags width",
        "window": "num_slots lags-1 width",
        "slots": "sequences",
        "query_start_loc": "sequences+1",
        "return": "tokens width",
    },
    dtypes={
        "x": FLOATING,
        "weight": "x",
        "window": "x",
        "slots": torch.int32,
        "query_start_loc": torch.int32,
        "return": "x",
    },
    rowwise=None,
    state=("window",),
    mutates=("window",),
    namespace="hal_toys",
)
def causal_conv(x: Tensor, weight: Tensor, window: Tensor, slots: Tensor, query_start_loc: Tensor) -> Tensor:
    """Compute a convolution over each sequence, whose last rows before this step are in ``window``."""
    owner, place = _owners(x.shape[0], query_start_loc)
    before, kept = window[slots.long()], window.shape[1]
    token = torch.arange(x.shape[0], device=x.device)
    total = torch.zeros_like(x, dtype=torch.float32)
    for lag in range(weight.shape[0]):
        old = before[owner, (kept + place - lag).clamp(0, kept - 1)]
        row = torch.where((place >= lag)[:, None], x[(token - lag).clamp(min=0)], old)
        total = total + row.float() * weight[weight.shape[0] - 1 - lag].float()
    starts = query_start_loc.long()
    count = starts[1:] - starts[:-1]
    rows = []
    for back in range(kept, 0, -1):
        source = count - back
        new = x[(starts[:-1] + source).clamp(0, x.shape[0] - 1)]
        sequence = torch.arange(count.shape[0], device=x.device)
        old = before[sequence, (kept + source).clamp(0, kept - 1)]
        rows.append(torch.where((source >= 0)[:, None], new, old))
    window[slots.long()] = torch.stack(rows, dim=1)
    return total.to(x.dtype)


def _linear_attention_samples(draw: Draw) -> Iterator[Sample]:
    for index, (queries, slots, starts) in enumerate(_steps(draw)):
        keys, values = ((8, 16), (4, 8))[index % 2]
        rows = sum(queries)
        yield (
            draw.normal(rows, keys),
            draw.normal(rows, keys),
            draw.normal(rows, values),
            draw.normal(6, keys, values),
            slots,
            starts,
            0.9,
        )


@ops.op(
    samples=_linear_attention_samples,
    axes={
        "query": "tokens key_dim",
        "key": "tokens key_dim",
        "value": "tokens value_dim",
        "matrix": "num_slots key_dim value_dim",
        "slots": "sequences",
        "query_start_loc": "sequences+1",
        "return": "tokens value_dim",
    },
    dtypes={
        "query": FLOATING,
        "key": "query",
        "value": "query",
        "matrix": "query",
        "slots": torch.int32,
        "query_start_loc": torch.int32,
        "return": "query",
    },
    rowwise=None,
    state=("matrix",),
    mutates=("matrix",),
    namespace="hal_toys",
)
def linear_attention(
    query: Tensor, key: Tensor, value: Tensor, matrix: Tensor, slots: Tensor, query_start_loc: Tensor, decay: float
) -> Tensor:
    """Compute ``matrix = decay * matrix + key value``, then ``query matrix``, per token of each sequence, in order."""
    owner, place = _owners(query.shape[0], query_start_loc)
    starts = query_start_loc.long()
    count, before = starts[1:] - starts[:-1], matrix[slots.long()].float()
    wide = [each.float() for each in (query, key, value)]
    apart = (place[:, None] - place[None, :]).float()
    sees = (owner[:, None] == owner[None, :]) & (apart >= 0)
    weights = torch.where(sees, decay ** apart.clamp(min=0), torch.zeros_like(apart))
    result = ((wide[0] @ wide[1].t()) * weights) @ wide[2]
    old = torch.einsum("tk,tkv->tv", wide[0], before[owner])
    result = result + old * (decay ** (place + 1).float())[:, None]
    left = (count[owner] - 1 - place).float()
    own = (owner[None, :] == torch.arange(count.shape[0], device=query.device)[:, None]).float() * decay**left
    added = torch.einsum("st,tk,tv->skv", own, wide[1], wide[2])
    matrix[slots.long()] = (before * (decay ** count.float())[:, None, None] + added).to(matrix.dtype)
    return result.to(query.dtype)


class RecurrentLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.keys, self.values = 8, 16
        self.norm, self.project = RMSNorm(width, 1e-6), Linear(width, 2 * self.keys + self.values)
        self.conv = nn.Parameter(torch.empty(LAGS, width), requires_grad=False)
        self.out = Linear(self.values, width)
        self.states = {
            "matrix": State(SEQUENCE, (self.keys, self.values)),
            "window": State(SEQUENCE, (LAGS - 1, width)),
        }

    def forward(self, hidden: Tensor, batch: SlotBatch, state: LayerState) -> Tensor:
        mixed = causal_conv(self.norm(hidden), self.conv, state["window"], batch.slots, batch.query_start_loc)
        query, key, value = self.project(mixed).split([self.keys, self.keys, self.values], dim=-1)
        attended = linear_attention(query, key, value, state["matrix"], batch.slots, batch.query_start_loc, 0.9)
        return hidden + self.out(attended)


class RecurrentForCausalLM(ToyLM):
    batch_type = SlotBatch

    def layer(self, index: int, width: int, heads: int) -> AttentionLayer | RecurrentLayer:
        return AttentionLayer(width, heads) if index % 2 else RecurrentLayer(width)
