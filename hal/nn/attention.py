"""Attention over the paged cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

from hal import ops
from hal.device.group import Group
from hal.errors import OperationError
from hal.nn.weights.share import Share
from hal.step.batch import Batch
from hal.step.state import LayerStates, key_value_states


class Attention(nn.Module):
    """Causal attention over the paged cache, without weights. Stores the new keys and values first.

    Args:
        num_kv_heads: the number of key heads, equal to the number of value heads.
        head_dim: elements per head.
        sliding_window: the number of tokens that a query attends to, including its own; None for all.
        scale: factor of the scores; None for ``head_dim ** -0.5``.

    Raises:
        OperationError: the window is less than 1.

    Attributes:
        states: the states of the layer, ``key`` and ``value``, per token.
    """

    def __init__(
        self, num_kv_heads: int, head_dim: int, *, sliding_window: int | None = None, scale: float | None = None
    ) -> None:
        super().__init__()
        if sliding_window is not None and sliding_window < 1:
            raise OperationError(
                f"attention has sliding_window = {sliding_window}, which excludes the query's own token",
                "set sliding_window to 1 or more, or to None for no window",
            )
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
        self.scale = head_dim**-0.5 if scale is None else scale
        self.states: LayerStates = key_value_states(num_kv_heads, head_dim, window=sliding_window)
        self.sliding_window = sliding_window

    def split(self, tensor: Group) -> None:
        """Keep the states of this rank's heads from now on. Ranks repeat key heads if there are more ranks than heads.

        Args:
            tensor: the ranks that split each layer.

        Raises:
            ConfigError: the ranks cannot share the key heads.
        """
        heads = Share(repeat=True).size(self.num_kv_heads, tensor.size)
        self.states = key_value_states(heads, self.head_dim, window=self.sliding_window)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, batch: Batch, state: Mapping[str, Tensor]) -> Tensor:
        """Store the keys and values, and attend.

        Args:
            query: ``[tokens, num_heads, head_dim]``.
            key: ``[tokens, num_kv_heads, head_dim]``.
            value: as ``key``.
            batch: the step.
            state: this layer's ``key`` and ``value`` caches.

        Returns:
            ``[tokens, num_heads * head_dim]``.
        """
        key_cache, value_cache = state["key"], state["value"]
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
            self.scale,
            True,
            self.sliding_window,
        )
        return attended.flatten(1)

    if TYPE_CHECKING:
        __call__ = forward
