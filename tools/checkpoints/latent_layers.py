"""Latent attention with an index that trains with it, in blocks of queries: the layers of DeepSeek-V3.2.

The index learns the distribution of the attention's weights: a Kullback-Leibler divergence whose gradient reaches the
index alone. First all tokens attend to all earlier ones; then to those that the index selects.

Source: DeepSeek-AI, *DeepSeek-V3.2*, 2025, section 2.1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DeepseekV32ForCausalLM
from transformers.models.deepseek_v32.modeling_deepseek_v32 import (
    DeepseekV32Attention,
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_interleave,
)

BLOCK = 256
"""The number of queries computed at once; they see no key after the last of them."""
HIDDEN = -1e9
"""The score of a key that a query does not see."""

Choice = Callable[[Tensor, int, int], Tensor]


def best(scores: Tensor, first: int, budget: int) -> Tensor:
    """Return the indices of the highest scores.

    Args:
        scores: Scores of an index, (batch, queries, keys), HIDDEN for keys after the query.
        first: The position of the first query.
        budget: The number of keys that a query attends to.
    """
    return scores.topk(min(budget, scores.shape[-1])).indices


def worst(scores: Tensor, first: int, budget: int) -> Tensor:
    """Return the indices of the lowest scores."""
    return best(torch.where(scores > HIDDEN / 2, -scores, HIDDEN), first, budget)


def last(scores: Tensor, first: int, budget: int) -> Tensor:
    """Return the indices of the last keys."""
    places = torch.arange(scores.shape[-1], device=scores.device).expand_as(scores)
    return best(torch.where(scores > HIDDEN / 2, places.float(), HIDDEN), first, budget)


def shifted(scores: Tensor, first: int, budget: int) -> Tensor:
    """Return the indices before those of the highest scores."""
    return (best(scores, first, budget) - 1).clamp(min=0)


class TrainedAttention(DeepseekV32Attention):
    """Attention for whole sequences without a cache, whose index has a loss.

    Attributes:
        sparse: Whether tokens attend to what the index selects.
        choice: What it selects.
        loss: After a forward pass, the divergence in nats of the index from the attention's weights, for each token.
    """

    sparse = False
    choice: Choice = staticmethod(best)
    loss: Tensor

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], *_: Any, **__: Any
    ) -> tuple[Tensor, None]:
        batch, length = hidden_states.shape[:2]
        compressed = self.q_a_layernorm(self.q_a_proj(hidden_states))
        query = self.q_b_proj(compressed).unflatten(-1, (-1, self.qk_head_dim)).transpose(1, 2)
        plain, rotated = query.split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
        latent, turned = self.kv_a_proj_with_mqa(hidden_states).split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
        rotated, turned = apply_rotary_pos_emb_interleave(rotated, turned[:, None], *position_embeddings)
        query = torch.cat([plain, rotated], -1) * self.scaling
        wide = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        key, value = wide.split([self.qk_nope_head_dim, self.v_head_dim], -1)
        key = torch.cat([key, turned.expand(-1, self.num_heads, -1, -1)], -1)
        index = self.index_parts(hidden_states.detach(), compressed.detach(), position_embeddings)
        positions = torch.arange(length, device=hidden_states.device)
        made, loss = [], hidden_states.new_zeros(())
        for first in range(0, length, BLOCK):
            end = min(first + BLOCK, length)
            seen = (positions[:end] <= positions[first:end, None]).expand(batch, -1, -1)
            scores = self.index_scores(index, first, end).masked_fill(~seen, HIDDEN)
            if self.sparse and end > self.indexer.index_topk:
                chosen = self.choice(scores.detach(), first, self.indexer.index_topk)
                seen = seen & torch.zeros_like(seen).scatter(-1, chosen, True)
                scores = scores.masked_fill(~seen, HIDDEN)
            weights = query[:, :, first:end] @ key[:, :, :end].transpose(2, 3)
            weights = weights.masked_fill(~seen[:, None], HIDDEN).softmax(-1)
            made.append(weights @ value[:, :, :end])
            target = weights.detach().mean(1)
            loss = loss + functional.kl_div(scores.log_softmax(-1), target, reduction="sum")
        self.loss = loss / (batch * length)
        return self.o_proj(torch.cat(made, 2).transpose(1, 2).flatten(2)), None

    def index_parts(self, hidden: Tensor, compressed: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        """Return the index's queries (batch, heads, length, size), keys (batch, 1, size, length), and weights."""
        part, rotated = self.indexer, self.qk_rope_head_dim
        query = part.wq_b(compressed).unflatten(-1, (part.n_heads, part.head_dim)).transpose(1, 2)
        key = part.k_norm(part.wk(hidden))[:, None]
        turned = apply_rotary_pos_emb(query[..., :rotated], key[..., :rotated], *angles)
        query, key = (torch.cat([a, b[..., rotated:]], -1) for a, b in zip(turned, (query, key), strict=True))
        weights = part.weights_proj(hidden).transpose(1, 2) * (part.softmax_scale * part.n_heads**-0.5)
        return query, key.transpose(2, 3), weights[..., None]

    def index_scores(self, parts: tuple[Tensor, ...], first: int, end: int) -> Tensor:
        """Return the scores of some queries and the keys up to the last of them, (batch, queries, keys)."""
        query, key, weights = parts
        return (functional.relu(query[:, :, first:end] @ key[..., :end]) * weights[:, :, first:end]).sum(1)


def make_trained(model: DeepseekV32ForCausalLM) -> list[TrainedAttention]:
    """Replace the model's attention by that of this file, with the same parameters, and return it."""
    made = []
    for number, layer in enumerate(model.model.layers):
        made.append(TrainedAttention(model.config, number))
        made[-1].load_state_dict(layer.self_attn.state_dict())
        layer.self_attn = made[-1].to(model.device)
    return made
