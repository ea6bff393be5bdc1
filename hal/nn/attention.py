"""Attention over the paged cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

from hal import ops
from hal.device.group import Group
from hal.errors import ConfigError
from hal.nn.weights.share import Share
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
        states: the states of the layer, ``key`` and ``value``, per token.
    """

    def __init__(
        self, num_kv_heads: int, head_dim: int, options: AttentionOptions | None = None, *, shared: bool = False
    ) -> None:
        super().__init__()
        self.num_kv_heads, self.head_dim, self.shared = num_kv_heads, head_dim, shared
        self.options = options or AttentionOptions(head_dim**-0.5)
        self.states = self._states(num_kv_heads)

    def _states(self, heads: int) -> LayerStates:
        return {} if self.shared else key_value_states(heads, self.head_dim, window=self.options.window)

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
            state: the ``key`` and ``value`` caches of this layer, or of that one.
            sinks: ``[num_heads]``; see :func:`hal.ops.paged_attention`.

        Returns:
            ``[tokens, num_heads * head_dim]``.
        """
        key_cache, value_cache = state["key"], state["value"]
        if key is not None and value is not None:
            ops.store_kv_cache(key, value, key_cache, value_cache, batch.slot_mapping)
        attended = ops.paged_attention(
            query,
            key_cache,
            value_cache,
            batch.block_table,
            batch.query_start_loc,
            batch.kv_lens,
            batch.query_start_loc_host,
            batch.kv_lens_host,
            sinks,
            self.options,
        )
        return attended.flatten(1)

    if TYPE_CHECKING:
        __call__ = forward
