"""Attention with its projections, norms of query and key, and rotary positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from hal import ops
from hal.device.group import Group
from hal.nn.attention import Attention
from hal.nn.decoder_config import DecoderConfig
from hal.nn.linear import Linear, MergedLinear
from hal.nn.model import LayerState
from hal.nn.rotary import RotaryEmbedding
from hal.nn.weights.weight import Share, Weight
from hal.ops import AttentionOptions
from hal.step.batch import Batch
from hal.step.state import LayerStates

Norm = Callable[..., nn.Module]
"""Makes a norm of a number of features, such as ``partial(RMSNorm, eps=1e-6)``."""
Angles = tuple[Tensor, Tensor] | None
"""The cos and sin of a layer's positions; None for a layer without a rotary embedding."""


class SelfAttention(nn.Module):
    """Grouped-query attention and its projections, in the order: project, normalize, rotate, attend, gate, project.

    Args:
        config: the sizes.
        rotary: the rotary embedding, which layers share; None for none (NoPE).
        window: the number of tokens that a query attends to, including its own; None for all.
        scale: factor of the scores; None for ``head_dim ** -0.5``.
        softcap: bound of the scores; see :class:`hal.ops.AttentionOptions`.
        causal: whether a query attends only to tokens up to its own.
        sinks: whether the softmax has a learned score more for each head, in the tensor ``sinks``.
        bias: whether the projections of query, key and value have biases, and whether that of the output has one; None
            for ``config.attention_bias``.
        norm: makes the norms ``q_norm`` and ``k_norm``; None for none.
        norm_over: whether these are over each ``head``, or over all heads (``width``). Over all, ``norm`` gets the
            keyword ``share`` too, as :class:`RMSNorm` does, by which ranks share the features.
        gate: whether the sigmoid of a gate scales the output. The gate of a head follows its query in ``q_proj``.

    Attributes:
        qkv_proj: the projections of query, key and value, as one.
        q_norm: the norm of the query, if any; likewise ``k_norm``.
        attention: the attention, without projections.
        o_proj: the projection of the output.
        rotaries: the rotary embedding, in a tuple; empty for none.
    """

    def __init__(
        self,
        config: DecoderConfig,
        rotary: RotaryEmbedding | None,
        *,
        window: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        causal: bool = True,
        sinks: bool = False,
        bias: tuple[bool, bool] | None = None,
        norm: Norm | None = None,
        norm_over: Literal["head", "width"] = "head",
        gate: bool = False,
    ) -> None:
        super().__init__()
        self.head_dim, kv_heads, self.gate = config.head_dim, config.num_key_value_heads, gate
        width, kv_width = config.num_attention_heads * self.head_dim, kv_heads * self.head_dim
        parts = {"q_proj": width * 2 if gate else width, "k_proj": kv_width, "v_proj": kv_width}
        qkv_bias, output_bias = bias or (config.attention_bias, config.attention_bias)
        by_head = Share(self.head_dim, repeat=True)
        # In a tuple, so that it is a submodule of the decoder only.
        self.rotaries: tuple[RotaryEmbedding, ...] = () if rotary is None else (rotary,)
        self.qkv_proj = MergedLinear(config.hidden_size, parts, bias=qkv_bias, share=by_head)
        self.norm_over = None if norm is None else norm_over
        if norm is not None and norm_over == "head":
            self.q_norm, self.k_norm = norm(self.head_dim), norm(self.head_dim)
        elif norm is not None:
            self.q_norm, self.k_norm = norm(width, share=by_head), norm(kv_width, share=by_head)
        options = AttentionOptions(self.head_dim**-0.5 if scale is None else scale, window, softcap, causal)
        self.attention = Attention(kv_heads, self.head_dim, options)
        self.sinks: nn.Parameter | None
        values = nn.Parameter(torch.empty(config.num_attention_heads), requires_grad=False) if sinks else None
        self.register_parameter("sinks", values)
        self.o_proj = Linear(
            width, config.hidden_size, bias=output_bias, shard="in_features", share=Share(self.head_dim)
        )

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The declaration of the sinks; those of the projections are in their layers."""
        return {"sinks": Weight(("sinks",), "num_heads", "num_heads")}

    @property
    def states(self) -> LayerStates:
        """The states of this rank's heads; see :class:`Attention`."""
        return self.attention.states

    @property
    def causal(self) -> bool:
        """Whether a query attends only to tokens up to its own."""
        return self.attention.options.causal

    def split(self, tensor: Group) -> None:
        """Compute this rank's heads from now on, which the projections say.

        Args:
            tensor: the ranks that split each layer.
        """

    def forward(self, hidden: Tensor, angles: Angles, batch: Batch, state: LayerState) -> Tensor:
        """Map ``[tokens, hidden_size]`` to the same shape; see :class:`RotaryEmbedding` and :class:`Attention`."""
        query, key, value = self.qkv_proj(hidden).split(self.qkv_proj.sizes, dim=-1)
        gate = None
        if self.gate:
            query, gate = query.unflatten(1, (-1, 2, self.head_dim)).unbind(2)
        if self.norm_over == "width":
            query, key = self.q_norm(query.flatten(1)), self.k_norm(key)
        query, key, value = (self._heads(each) for each in (query, key, value))
        if self.norm_over == "head":
            query, key = self.q_norm(query), self.k_norm(key)
        if angles is not None:
            query, key = ops.rotary_embedding(query, key, *angles, self.rotaries[0].interleaved)
        attended = self.attention(query, key, value, batch, state, self.sinks)
        return self.o_proj(attended if gate is None else attended * gate.flatten(1).sigmoid())

    def _heads(self, x: Tensor) -> Tensor:
        return x if x.dim() == 3 else x.view(-1, x.shape[-1] // self.head_dim, self.head_dim)

    if TYPE_CHECKING:
        __call__ = forward
