"""Layers that predict a model's further tokens, in plain torch, as they are trained: a head of EAGLE-3, and MTP.

Both read, for each position, the token behind it and hidden states of the model, and predict the token after that one.
Then they go on with their own hidden states, as they do when they draft: :meth:`Predictor.unrolled`.

Source: Li et al., *EAGLE-3: Scaling up Inference Acceleration via Training-Time Test*, 2025; Gloeckle et al., *Better &
Faster Large Language Models via Multi-token Prediction*, 2024; Qwen Team, *Qwen3-Next*, 2025.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Norm(nn.Module):
    """A root mean square norm, whose factor is ``offset + weight``."""

    def __init__(self, width: int, eps: float, offset: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), 1.0 - offset))
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.weight + self.offset, self.eps)


class Attention(nn.Module):
    """Grouped-query attention of ``inputs`` features; if ``gated``, with norms of heads and a gate."""

    def __init__(self, config: Any, inputs: int, gated: bool) -> None:
        super().__init__()
        self.heads, self.groups, self.size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.gated = gated
        self.q_proj = nn.Linear(inputs, self.heads * self.size * (1 + gated), bias=False)
        self.k_proj = nn.Linear(inputs, self.groups * self.size, bias=False)
        self.v_proj = nn.Linear(inputs, self.groups * self.size, bias=False)
        self.o_proj = nn.Linear(self.heads * self.size, config.hidden_size, bias=False)
        if gated:
            self.q_norm, self.k_norm = (Norm(self.size, config.rms_norm_eps, 1.0) for _ in range(2))
        rope = config.rope_parameters
        rotated = int(self.size * rope.get("partial_rotary_factor", 1.0))
        frequencies = rope["rope_theta"] ** (-torch.arange(0, rotated, 2) / rotated)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, x: Tensor, earlier: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Attend to the keys of step 0 up to a position, and to those of later steps on its own chain.

        Args:
            x: ``[rows, positions, inputs]`` of a step of the chain.
            earlier: keys and values ``[rows, groups, positions, size]`` of the steps before; this step's are added.
        """
        rows, count, _ = x.shape
        q, gate = self.q_proj(x).view(rows, count, self.heads, -1).split([self.size, self.size * self.gated], -1)
        k, v = (project(x).view(rows, count, self.groups, self.size) for project in (self.k_proj, self.v_proj))
        if self.gated:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (each.transpose(1, 2) for each in (self._rotated(q), self._rotated(k), v))
        earlier.append((k, v))
        q = q.unflatten(1, (self.groups, -1)) / math.sqrt(self.size)
        step, places = len(earlier) - 1, torch.arange(count, device=x.device)
        scores = q @ earlier[0][0].unsqueeze(2).transpose(-2, -1)
        parts = [scores.masked_fill(places > places[:, None] - step, -math.inf)]
        chain = [(_shifted(keys, step - s), _shifted(values, step - s)) for s, (keys, values) in enumerate(earlier)][1:]
        parts += [(q * keys.unsqueeze(2)).sum(-1, keepdim=True) for keys, _ in chain]
        weights = torch.cat(parts, -1).softmax(-1)
        y = weights[..., :count] @ earlier[0][1].unsqueeze(2)
        for index, (_, values) in enumerate(chain):
            y = y + weights[..., count + index, None] * values.unsqueeze(2)
        y = y.flatten(1, 2).transpose(1, 2)
        return self.o_proj((y * gate.sigmoid() if self.gated else y).flatten(-2))

    def _rotated(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[1], device=x.device)[:, None, None] * self.frequencies
        half = self.frequencies.numel()
        a, b, rest = x.split([half, half, self.size - 2 * half], -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def _shifted(x: Tensor, by: int) -> Tensor:
    """Return ``x[..., i - by, :]`` at position ``i``, and zeros before."""
    return functional.pad(x, (0, 0, by, 0))[:, :, : x.shape[2]]


class MLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """The layer: :meth:`forward` returns its output for a step of the chain."""

    def __init__(self, config: Any, inputs: int, gated: bool, offset: float) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn, self.mlp = Attention(config, inputs, gated), MLP(width, config.intermediate_size)
        self.input_layernorm, self.post_attention_layernorm = Norm(width, eps, offset), Norm(width, eps, offset)

    def forward(self, read: Tensor, residual: Tensor, earlier: list[tuple[Tensor, Tensor]]) -> Tensor:
        residual = residual + self.self_attn(read, earlier)
        return residual + self.mlp(self.post_attention_layernorm(residual))


class Predictor(nn.Module, ABC):
    """What both kinds share. The tensors' names are those of published checkpoints."""

    @abstractmethod
    def start(self, hidden: Tensor) -> Tensor:
        """Return what the first step reads of the model's hidden states."""

    @abstractmethod
    def step(self, embeddings: Tensor, hidden: Tensor, earlier: list[Any]) -> tuple[Tensor, Tensor]:
        """Return the hidden states that the next step reads, and those of the logits."""

    def unrolled(self, embeddings: Tensor, hidden: Tensor, steps: int) -> list[Tensor]:
        """Return the hidden states of the logits of each step of chains that begin at every position.

        Args:
            embeddings: ``[rows, positions, width]``, of the token behind each position.
            hidden: the model's, at each position.
            steps: the steps. Step ``s`` at a position continues the chain that began ``s`` positions before.
        """
        earlier: list[Any] = []
        found, state = [], self.start(hidden)
        for _ in range(steps):
            state, read = self.step(embeddings, state, earlier)
            found.append(read)
            state = functional.pad(state, (0, 0, 1, 0))[:, :-1]
        return found


class EagleHead(Predictor):
    """A head of EAGLE-3, which drafts a part of the vocabulary."""

    def __init__(self, config: Any, layers: int, vocabulary: int) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(layers * width, width, bias=False)
        self.midlayer = Layer(config, 2 * width, gated=False, offset=0.0)
        self.midlayer.hidden_norm = Norm(width, eps, 0.0)
        self.norm = Norm(width, eps, 0.0)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def start(self, hidden: Tensor) -> Tensor:
        return self.fc(hidden)

    def step(self, embeddings: Tensor, hidden: Tensor, earlier: list[Any]) -> tuple[Tensor, Tensor]:
        layer = self.midlayer
        read = torch.cat([layer.input_layernorm(embeddings), layer.hidden_norm(hidden)], -1)
        found = layer(read, hidden, earlier)
        return found, self.norm(found)


class PredictingLayer(Predictor):
    """The layer of Qwen3-Next that predicts the token after the next one, with a dense MLP."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (Norm(width, eps, 1.0) for _ in range(3))
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList([Layer(config, width, gated=True, offset=1.0)])

    def start(self, hidden: Tensor) -> Tensor:
        return hidden

    def step(self, embeddings: Tensor, hidden: Tensor, earlier: list[Any]) -> tuple[Tensor, Tensor]:
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)], -1))
        layer = self.layers[0]
        found = self.norm(layer(layer.input_layernorm(x), x, earlier))
        return found, found
