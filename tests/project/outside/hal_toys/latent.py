"""(a) Latent attention: one compressed row of 24 elements per token and layer, shared by all heads."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from hal import ops
from hal.nn import Linear, RMSNorm
from hal.nn.model import LayerState
from hal.ops import FLOATING, Draw, Sample
from hal.step import TOKEN, Batch, State

from .model import ToyLM

LATENT = 24


def _store_samples(draw: Draw) -> Iterator[Sample]:
    for tokens, width in ((1, 24), (5, 16), (9, 24)):
        cache = draw.normal(3, 8, width)
        yield draw.normal(tokens, width), cache, draw.permutation(24)[:tokens].to(torch.int32)


@ops.op(
    samples=_store_samples,
    axes={"latent": "tokens width", "latent_cache": "num_blocks block_size width", "slot_mapping": "tokens"},
    dtypes={"latent": FLOATING, "latent_cache": "latent", "slot_mapping": torch.int32},
    rowwise="tokens",
    state=("latent_cache",),
    mutates=("latent_cache",),
    namespace="hal_toys",
)
def store_toy_latent(latent: Tensor, latent_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write each token's latent row into its slot."""
    latent_cache.view(-1, latent_cache.shape[-1])[slot_mapping.long()] = latent


def _attention_samples(draw: Draw) -> Iterator[Sample]:
    for queries, lengths, heads, width in (([1], [1], 2, 24), ([3, 1], [3, 20], 3, 16), ([1, 1, 1], [9, 1, 17], 2, 24)):
        starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
        table = (1 + draw.permutation(4 * len(lengths))).view(len(lengths), 4).to(torch.int32)
        yield (
            draw.normal(sum(queries), heads, width),
            draw.normal(4 * len(lengths) + 1, 8, width),
            table,
            starts.to(draw.device),
            torch.tensor(lengths, dtype=torch.int32).to(draw.device),
            width**-0.5,
        )


@ops.op(
    samples=_attention_samples,
    axes={
        "query": "tokens heads width",
        "latent_cache": "num_blocks block_size width",
        "block_table": "sequences blocks",
        "query_start_loc": "sequences+1",
        "kv_lens": "sequences",
        "return": "tokens heads width",
    },
    dtypes={
        "query": FLOATING,
        "latent_cache": "query",
        "block_table": torch.int32,
        "query_start_loc": torch.int32,
        "kv_lens": torch.int32,
        "return": "query",
    },
    rowwise=None,
    state=("latent_cache",),
    namespace="hal_toys",
)
def toy_latent_attention(
    query: Tensor, latent_cache: Tensor, block_table: Tensor, query_start_loc: Tensor, kv_lens: Tensor, scale: float
) -> Tensor:
    """Compute causal attention in which the latent row is key and value of every head."""
    tokens, sequences = query.shape[0], kv_lens.shape[0]
    capacity = block_table.shape[1] * latent_cache.shape[1]
    token = torch.arange(tokens, device=query.device)
    owner = torch.searchsorted(query_start_loc[1:].long(), token, right=True).clamp(max=sequences - 1)
    position = kv_lens.long()[owner] - query_start_loc.long()[owner + 1] + token
    slot = torch.arange(capacity, device=query.device)
    rows = latent_cache[block_table.long()].view(sequences, capacity, -1).float()
    filled = (slot < kv_lens[:, None])[:, :, None]
    rows = rows.masked_fill(~filled, 0.0)[owner]
    scores = torch.einsum("thw,tsw->ths", query.float(), rows) * scale
    hidden = (slot > position[:, None]) | (slot >= kv_lens.long()[owner][:, None])
    weights = scores.masked_fill(hidden[:, None], float("-inf")).softmax(-1).masked_fill(hidden[:, None], 0.0)
    return torch.einsum("ths,tsw->thw", weights, rows).to(query.dtype)


class LatentLayer(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.down = RMSNorm(hidden, 1e-6), Linear(hidden, LATENT)
        self.query, self.out = Linear(hidden, heads * LATENT), Linear(heads * LATENT, hidden)
        self.states = {"latent": State(TOKEN, (LATENT,))}

    def forward(self, hidden: Tensor, batch: Batch, state: LayerState) -> Tensor:
        normed = self.norm(hidden)
        store_toy_latent(self.down(normed), state["latent"], batch.slot_mapping)
        query = self.query(normed).view(-1, self.heads, LATENT)
        attended = toy_latent_attention(
            query, state["latent"], batch.block_table, batch.query_start_loc, batch.kv_lens, LATENT**-0.5
        )
        return hidden + self.out(attended.flatten(1))


class LatentForCausalLM(ToyLM):
    def layer(self, index: int, width: int, heads: int) -> LatentLayer:
        return LatentLayer(width, heads)
