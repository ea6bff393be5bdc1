"""Attention over the paged cache, alone and with its projections, norms and rotary positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from hal import ops
from hal.device.group import Group
from hal.errors import ConfigError
from hal.nn.decoder_config import DecoderConfig
from hal.nn.linear import Linear, MergedLinear
from hal.nn.model import Angles, LayerState
from hal.nn.rotary import RotaryEmbedding
from hal.nn.weights.assembly import Stacked
from hal.nn.weights.weight import Share, Weight
from hal.ops import AttentionOptions
from hal.step.batch import Batch
from hal.step.state import LayerStates, key_value_states


class Attention(nn.Module):
    """Attention over the paged cache, without weights. Stores the new keys and values first.

    Args:
        num_kv_heads: the number of key heads, equal to the number of value heads.
        head_dim: elements per head.
        options: scale, window and softcap; None for the scale ``head_dim ** -0.5`` alone.
        shared: whether it reads the states of another layer, and has none.

    Attributes:
        states: the states of the layer, per token: ``key`` and ``value``, and of a quantized cache ``key_scale`` and
            ``value_scale``.
        quantized: the dtype of the numbers of a quantized cache; None for the model's.
        key_scale: the scale of quantized keys, ``[1]``, that the checkpoint has; None for one of each token and head.
        value_scale: as ``key_scale``.
    """

    key_scale: Tensor | None
    value_scale: Tensor | None

    def __init__(
        self, num_kv_heads: int, head_dim: int, options: AttentionOptions | None = None, *, shared: bool = False
    ) -> None:
        super().__init__()
        self.num_kv_heads, self.head_dim, self.shared = num_kv_heads, head_dim, shared
        self.options = options or AttentionOptions(head_dim**-0.5)
        self.quantized: torch.dtype | None = None
        self._fixed = False
        self._scales: str | None = None
        self.register_buffer("key_scale", None)
        self.register_buffer("value_scale", None)
        self.states = self._states(num_kv_heads)

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The declarations of the scales that a checkpoint has beside the projections."""
        return {
            f"{name}_scale": Weight(
                (f".{self._scales.format(name[0])}",), "parts", assemble=Stacked(), dtype=torch.float32, column=True
            )
            for name in ("key", "value")
            if self._scales is not None
        }

    def quantize_cache(self, dtype: torch.dtype | None, *, scales: str | None = None, fixed: bool = False) -> None:
        """Keep keys and values in 8 bits from now on.

        Args:
            dtype: int8, or uint8 for the bits of float8 (e4m3); None for the model's.
            scales: the name of the checkpoint's scales, with ``{0}`` for ``k`` or ``v``; None if it has none.
            fixed: whether to use these.
        """
        self.quantized, self._fixed, self._scales = dtype, fixed, scales
        if scales is not None and not self.shared:
            self.key_scale, self.value_scale = (torch.empty(1, dtype=torch.float32, device="meta") for _ in range(2))
        self.states = self._states(self.num_kv_heads)

    def _states(self, heads: int) -> LayerStates:
        return (
            {}
            if self.shared
            else key_value_states(heads, self.head_dim, window=self.options.window, quantized=self.quantized)
        )

    def split(self, tensor: Group) -> None:
        """Keep the states of this rank's heads from now on. Ranks repeat key heads if there are more ranks than heads.

        Raises:
            ConfigError: the ranks cannot share the key heads, or the heads have position biases.
        """
        if self.options.alibi is not None and tensor.size > 1:
            raise ConfigError(
                "ranks do not split attention with the position biases of ALiBi, whose slopes differ by head",
                "run it on one device, or set the option data of parallel",
            )
        self.states = self._states(Share(repeat=True).size(self.num_kv_heads, tensor.size))

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        batch: Batch,
        state: Mapping[str, Tensor],
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Store the keys and values, and attend.

        Args:
            query: ``[tokens, num_heads, head_dim]``.
            key: ``[tokens, num_kv_heads, head_dim]``; None if another layer stored the keys and values.
            value: as ``key``.
            batch: the step.
            state: the ``key`` and ``value`` caches of this layer, or of that one, and their scales.
            sinks: ``[num_heads]``; see :func:`hal.ops.paged_attention`.

        Returns:
            ``[tokens, num_heads * head_dim]``.
        """
        if key is not None and value is not None:
            self.store(key, value, batch, state)
        return self.attend(query, batch, state, sinks).flatten(1)

    def store(self, key: Tensor, value: Tensor, batch: Batch, state: Mapping[str, Tensor]) -> None:
        """Store keys and values ``[tokens, num_kv_heads, head_dim]``; see :meth:`forward`."""
        keys, values, slots = state["key"], state["value"], batch.slot_mapping
        if self.quantized is None:
            ops.store_kv_cache(key, value, keys, values, slots)
            return
        fixed = (self.key_scale, self.value_scale) if self._fixed else (None, None)
        key_scale, value_scale = (None if each is None else each.expand(key.shape[1]) for each in fixed)
        scales = state["key_scale"], state["value_scale"]
        ops.store_quantized_kv_cache(key, value, key_scale, value_scale, keys, values, *scales, slots)

    def attend(self, query: Tensor, batch: Batch, state: Mapping[str, Tensor], sinks: Tensor | None = None) -> Tensor:
        """Attend with queries ``[tokens, num_heads, head_dim]``, and return that shape; see :meth:`forward`."""
        cache, lengths = (state["key"], state["value"]), (batch.query_start_loc, batch.kv_lens)
        on_host = batch.query_start_loc_host, batch.kv_lens_host
        if self.quantized is None:
            return ops.paged_attention(query, *cache, batch.block_table, *lengths, *on_host, sinks, self.options)
        scales = state["key_scale"], state["value_scale"]
        return ops.quantized_paged_attention(
            query, *cache, *scales, batch.block_table, *lengths, *on_host, sinks, self.options
        )

    if TYPE_CHECKING:
        __call__ = forward


Norm = Callable[..., nn.Module]
"""Makes a norm of a number of features, such as ``partial(RMSNorm, eps=1e-6)``."""


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
        value_norm: makes the norm ``v_norm`` of each head of values; None for none.
        key_as_value: whether keys before their norm are the values, too.
        shared: whether it reads the states of another layer, and has queries alone; see :class:`Attention`.
        inputs: the features that it reads; None for ``config.hidden_size``.

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
        value_norm: Norm | None = None,
        key_as_value: bool = False,
        shared: bool = False,
        inputs: int | None = None,
    ) -> None:
        super().__init__()
        self.head_dim, kv_heads, self.gate = config.head_dim, config.num_key_value_heads, gate
        width, kv_width = config.num_attention_heads * self.head_dim, kv_heads * self.head_dim
        parts = {"q_proj": width * 2 if gate else width}
        if not shared:
            parts |= {"k_proj": kv_width} if key_as_value else {"k_proj": kv_width, "v_proj": kv_width}
        qkv_bias, output_bias = bias or (config.attention_bias, config.attention_bias)
        by_head = Share(self.head_dim, repeat=True)
        # In a tuple, so that it is a submodule of the decoder only.
        self.rotaries: tuple[RotaryEmbedding, ...] = () if rotary is None else (rotary,)
        self.qkv_proj = MergedLinear(inputs or config.hidden_size, parts, bias=qkv_bias, share=by_head)
        self.norm_over = None if norm is None else norm_over
        if norm is not None and norm_over == "head":
            self.q_norm = norm(self.head_dim)
            if not shared:
                self.k_norm = norm(self.head_dim)
        elif norm is not None:
            self.q_norm, self.k_norm = norm(width, share=by_head), norm(kv_width, share=by_head)
        self.v_norm = None if value_norm is None or shared else value_norm(self.head_dim)
        options = AttentionOptions(self.head_dim**-0.5 if scale is None else scale, window, softcap, causal)
        self.attention = Attention(kv_heads, self.head_dim, options, shared=shared)
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
        """Compute this rank's heads from now on, which the projections say."""

    def forward(self, hidden: Tensor, angles: Angles, batch: Batch, state: LayerState, *further: Any) -> Tensor:
        """Map ``[tokens, hidden_size]`` to the same shape; see :class:`RotaryEmbedding` and :class:`Attention`.

        ``attend`` gets further arguments, too.
        """
        query, *rest = self.qkv_proj(hidden).split(self.qkv_proj.sizes, dim=-1)
        gate = None
        if self.gate:
            query, gate = query.unflatten(1, (-1, 2, self.head_dim)).unbind(2)
        if self.norm_over == "width":
            query, rest[0] = self.q_norm(query.flatten(1)), self.k_norm(rest[0])
        query, *rest = (self._heads(each) for each in (query, *rest))
        key, value = (rest[0], rest[-1]) if rest else (query[:, :0], None)
        if self.norm_over == "head":
            query, key = self.q_norm(query), key if value is None else self.k_norm(key)
        if angles is not None:
            query, key = ops.rotary_embedding(query, key, *angles, self.rotaries[0].interleaved)
        if self.v_norm is not None:
            value = self.v_norm(value)
        attended = self.attend(hidden, query, key, value, angles, batch, state, *further)
        return self.o_proj(attended if gate is None else attended * ops.pointwise(gate.flatten(1), "sigmoid"))

    def attend(
        self,
        hidden: Tensor,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        angles: Angles,
        batch: Batch,
        state: LayerState,
        *further: Any,
    ) -> Tensor:
        """Store keys and values, and return the result of attention; see :class:`Attention`. A subclass may select."""
        return self.attention(query, key, value, batch, state, self.sinks)

    def _heads(self, x: Tensor) -> Tensor:
        return x if x.dim() == 3 else x.view(-1, x.shape[-1] // self.head_dim, self.head_dim)

    if TYPE_CHECKING:
        __call__ = forward
