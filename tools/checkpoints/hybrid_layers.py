"""Layers that train a Qwen3-Next model fast: fixed shapes, few launches, and no synchronization with the host.

They compute what transformers' layers compute, from the same parameters. All experts read all tokens, and the ones not
chosen have the weight zero. A step of these layers can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3NextForCausalLM
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet, Qwen3NextSparseMoeBlock

CHUNK = 64
FORGET = -100.0
"""The logarithm of a decay that leaves nothing of a state."""


def invert_unit_lower(strict: Tensor) -> Tensor:
    """Return the inverses of ``I + strict``, for strictly lower triangular matrices whose size is a power of two.

    Inverses of diagonal blocks give those of blocks twice as large.
    """
    size = strict.shape[-1]
    index = torch.arange(size, device=strict.device)
    inverse = torch.eye(size, device=strict.device, dtype=strict.dtype).expand_as(strict)
    block = 1
    while block < size:
        same_pair = index[:, None] // (2 * block) == index[None, :] // (2 * block)
        other_half = index[:, None] // block != index[None, :] // block
        corner = strict * (same_pair & other_half)
        inverse = inverse - (corner if block == 1 else inverse @ corner @ inverse)
        block *= 2
    return inverse


def gated_delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Return the outputs of the gated delta rule for whole sequences, in chunks.

    Args:
        query: Queries, (batch, length, heads, key size), normalized and scaled. The length is a multiple of CHUNK.
        key: Keys, normalized.
        value: Values, (batch, length, heads, value size).
        decay: Logarithms of the decays, (batch, length, heads).
        beta: Shares of the values to write, (batch, length, heads).
    """
    batch, length, heads, _ = query.shape

    def chunks(tensor: Tensor) -> Tensor:
        return tensor.transpose(1, 2).reshape(batch * heads, length // CHUNK, CHUNK, -1)

    query, key, value = chunks(query), chunks(key), chunks(value)
    decay, beta = chunks(decay).cumsum(2), chunks(beta)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=query.device).triu(1)
    pairs = (decay - decay.transpose(2, 3)).masked_fill(later, float("-inf")).exp()
    inverse = invert_unit_lower(((key * beta) @ key.transpose(2, 3) * pairs).tril(-1))
    written, read = inverse @ (value * beta), inverse @ (key * beta * decay.exp())
    scores, query = (query @ key.transpose(2, 3)) * pairs, query * decay.exp()
    key = (key * (decay[:, :, -1:] - decay).exp()).transpose(2, 3)
    state = query.new_zeros(batch * heads, query.shape[-1], value.shape[-1])
    states, values = [], []
    parts = zip(written.unbind(1), read.unbind(1), key.unbind(1), decay[:, :, -1:].exp().unbind(1), strict=True)
    for each_written, each_read, each_key, each_decay in parts:
        states.append(state)
        values.append(torch.baddbmm(each_written, each_read, state, alpha=-1))
        state = torch.baddbmm(state * each_decay, each_key, values[-1])
    made = query @ torch.stack(states, 1) + scores @ torch.stack(values, 1)
    return made.reshape(batch, heads, length, -1).transpose(1, 2)


class FastDeltaNet(Qwen3NextGatedDeltaNet):
    """A layer with the gated delta rule, for whole sequences without a cache.

    Attributes:
        cut: The token before which states and windows are lost, or None.
    """

    cut: int | None = None

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        batch, length, _ = hidden_states.shape
        parts = self.fix_query_key_value_ordering(self.in_proj_qkvz(hidden_states), self.in_proj_ba(hidden_states))
        *qkv, gate, beta, step = parts
        mixed = torch.cat([part.reshape(batch, length, -1) for part in qkv], -1)
        parts = [mixed] if self.cut is None else [mixed[:, : self.cut], mixed[:, self.cut :]]
        mixed = torch.cat([self.convolve(part) for part in parts], 1)
        query, key, value = mixed.split([self.key_dim, self.key_dim, self.value_dim], -1)
        query, key = (part.reshape(batch, length, self.num_k_heads, -1) for part in (query, key))
        query, key = (part * (part.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for part in (query, key))
        groups = self.num_v_heads // self.num_k_heads
        query, key = (part.repeat_interleave(groups, 2) for part in (query * self.head_k_dim**-0.5, key))
        value = value.reshape(batch, length, self.num_v_heads, -1)
        decay = -self.A_log.exp() * functional.softplus(step + self.dt_bias)
        if self.cut is not None:
            decay = decay.clone()
            decay[:, self.cut] = FORGET
        beta = beta.sigmoid()
        if spare := -length % CHUNK:
            query, key, value = (functional.pad(part, (0, 0, 0, 0, 0, spare)) for part in (query, key, value))
            decay, beta = (functional.pad(part, (0, 0, 0, spare)) for part in (decay, beta))
        made = gated_delta_rule(query, key, value, decay, beta)[:, :length]
        return self.out_proj(self.norm(made, gate).reshape(batch, length, -1))

    def convolve(self, mixed: Tensor) -> Tensor:
        """Return the activated convolution of (batch, length, channels)."""
        padded = functional.pad(mixed, (0, 0, self.conv_kernel_size - 1, 0))
        taps = self.conv1d.weight.squeeze(1).unbind(1)
        parts = [padded[:, tap : tap + mixed.shape[1]] * weight for tap, weight in enumerate(taps)]
        return functional.silu(sum(parts[1:], parts[0]))


class FastExperts(Qwen3NextSparseMoeBlock):
    """Experts that all read all tokens.

    Attributes:
        balance: After a forward pass, 1 if all experts get equal shares of the tokens, and more otherwise.
        counts: After a forward pass, how many choices each expert got.
    """

    balance: Tensor
    counts: Tensor

    def forward(self, hidden_states: Tensor) -> Tensor:
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        experts, top_k = self.experts, self.gate.top_k
        scores = functional.linear(flat, self.gate.weight).softmax(-1)
        best, chosen = scores.topk(top_k, -1)
        weights = torch.zeros_like(scores).scatter(1, chosen, best / best.sum(-1, keepdim=True))
        share = torch.zeros_like(scores).scatter(1, chosen, 1.0)
        self.counts = share.sum(0).detach()
        self.balance = len(scores[0]) / top_k * (share.mean(0) * scores.mean(0)).sum()
        wide = functional.linear(flat, experts.gate_up_proj.flatten(0, 1))
        gate, up = wide.unflatten(1, (experts.num_experts, 2, -1)).unbind(2)
        inner = functional.silu(gate) * up * weights[..., None]
        made = inner.flatten(1) @ experts.down_proj.transpose(1, 2).flatten(0, 1)
        shared = functional.sigmoid(self.shared_expert_gate(flat)) * self.shared_expert(flat)
        return (made + shared).reshape(hidden_states.shape)


def make_fast(model: Qwen3NextForCausalLM) -> None:
    """Replace the model's recurrent layers and experts by those of this file, with the same parameters."""
    for number, layer in enumerate(model.model.layers):
        for name, kind in (("linear_attn", FastDeltaNet), ("mlp", FastExperts)):
            slow = getattr(layer, name, None)
            if slow is None or type(slow) is not kind.__mro__[1]:
                continue
            fast = kind(model.config, number) if kind is FastDeltaNet else kind(model.config)
            fast.load_state_dict(slow.state_dict())
            setattr(layer, name, fast)
