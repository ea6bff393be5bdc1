"""Attention over the paged cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hal import ops
from hal.device.group import Group
from hal.errors import ConfigError
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
        self.register_buffer("key_scale", None)
        self.register_buffer("value_scale", None)
        self.states = self._states(num_kv_heads)

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The declarations of the scales that a checkpoint has beside the projections."""
        return {
            f"{name}_scale": Weight((f".{name[0]}_scale",), "one", dtype=torch.float32, column=True)
            for name in ("key", "value")
        }

    def quantize_cache(self, dtype: torch.dtype | None, *, scales: bool = False, fixed: bool = False) -> None:
        """Keep keys and values in 8 bits from now on.

        Args:
            dtype: int8, or uint8 for the bits of float8 (e4m3); None for the model's.
            scales: whether the checkpoint has scales.
            fixed: whether to use these.
        """
        self.quantized, self._fixed = dtype, fixed
        if scales and not self.shared:
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

        Args:
            tensor: the ranks that split each layer.

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
