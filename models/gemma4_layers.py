"""What only Gemma 4's layers have: experts beside the MLP, and an embedding of each token for each layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hal import ops
from hal.nn import (
    SANDWICH_NORMS,
    Angles,
    Decoder,
    DecoderLayer,
    Embedding,
    Experts,
    GatedMLP,
    LayerState,
    Linear,
    Mixer,
    RMSNorm,
    Router,
    Weight,
)
from hal.nn.mlp import ACTIVATIONS
from hal.step import Batch

from .gemma4_config import Gemma4Config


class Gemma4Router(Router):
    """A router of normalized and scaled tokens, whose weights have a factor for each expert."""

    def __init__(self, config: Gemma4Config) -> None:
        super().__init__(config.hidden_size, config.num_experts or 0, config.top_k_experts or 0, renormalize=True)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, learned=False)
        self.root = config.hidden_size**-0.5
        self.scale = nn.Parameter(torch.empty(config.hidden_size), requires_grad=False)
        self.per_expert_scale = nn.Parameter(torch.empty(self.out_features), requires_grad=False)

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The declarations of its tensors."""
        scales = {"scale": Weight(("scale",), "in_features")}
        return {**super().weights, **scales, "per_expert_scale": Weight(("per_expert_scale",), "out_features")}

    def choose(self, hidden: Tensor, *further: Tensor) -> tuple[Tensor, Tensor]:
        weights, experts = super().choose(self.norm(hidden) * self.scale * self.root)
        return weights * ops.embedding(experts.flatten(), self.per_expert_scale[:, None]).view_as(weights), experts


class Gemma4Layer(DecoderLayer):
    """A layer with an embedding of each token for this layer, and perhaps with experts beside the MLP."""

    def __init__(self, config: Gemma4Config, mixer: Mixer, width: int) -> None:
        hidden, act, norm = config.hidden_size, config.hidden_act, partial(RMSNorm, eps=config.rms_norm_eps)
        super().__init__(config, mixer, GatedMLP(hidden, width, activation=act), norm=norm, norms=SANDWICH_NORMS)
        self.layer_scalar = nn.Parameter(torch.empty(1), requires_grad=False)
        self.router = Gemma4Router(config) if config.enable_moe_block else None
        if self.router is not None:
            self.experts = Experts(self.router.out_features, hidden, config.moe_intermediate_size or 0, activation=act)
            self.post_feedforward_layernorm_1 = norm(hidden)
            self.pre_feedforward_layernorm_2 = norm(hidden)
            self.post_feedforward_layernorm_2 = norm(hidden)
        if features := config.hidden_size_per_layer_input:
            self.activation = ACTIVATIONS[act]
            self.per_layer_input_gate = Linear(hidden, features)
            self.per_layer_projection = Linear(features, hidden)
            self.post_per_layer_input_norm = norm(hidden)

    def forward(
        self, hidden: Tensor, angles: Angles, batch: Batch, state: LayerState, embedding: Tensor | None = None
    ) -> Tensor:
        hidden = super().forward(hidden, angles, batch, state)
        if embedding is not None:
            gated = self.activation(self.per_layer_input_gate(hidden)) * embedding
            hidden = hidden + self.post_per_layer_input_norm(self.per_layer_projection(gated))
        return hidden * self.layer_scalar

    def feed_forward(self, hidden: Tensor, normed: Tensor, batch: Batch) -> Tensor:
        dense = super().feed_forward(hidden, normed, batch)
        if self.router is None:
            return dense
        sparse = self.experts(self.pre_feedforward_layernorm_2(hidden), *self.router.choose(hidden))
        output: Tensor = self.post_feedforward_layernorm_1(dense) + self.post_feedforward_layernorm_2(sparse)
        return output

    if TYPE_CHECKING:
        __call__ = forward


class Gemma4Decoder(Decoder):
    """A decoder that gives each layer an embedding of its own, of the token and of its first hidden state."""

    def __init__(self, config: Gemma4Config, layers: Iterable[DecoderLayer], **options: Any) -> None:
        super().__init__(config, layers, **options)
        self.sources, self.features = config.sources, config.hidden_size_per_layer_input
        if self.features:
            width = config.num_hidden_layers * self.features
            self.embed_tokens_per_layer = Embedding(config.vocab_size_per_layer_input, width, self.features**0.5)
            self.per_layer_model_projection = Linear(config.hidden_size, width)
            self.per_layer_projection_norm = RMSNorm(self.features, config.rms_norm_eps)
            self.state_factor = config.hidden_size**-0.5

    def further(self, batch: Batch, embeddings: Tensor) -> Sequence[tuple[Tensor, ...]]:
        if not self.features:
            return super().further(batch, embeddings)
        tokens = self.embed_tokens_per_layer(batch.token_ids)
        states = self.per_layer_model_projection(embeddings) * self.state_factor
        normed = self.per_layer_projection_norm(states.view(-1, len(self.layers), self.features))
        both = (normed + tokens.view_as(normed)) * 2.0**-0.5
        return [(each,) for each in both.unbind(1)]

    def stored(self, layer: int) -> int:
        return self.sources[layer]
