"""Attention over the paged cache: npu_fused_infer_attention_score, and ATB's paged attention as an alternative.

Both read lengths on the host, when they are launched. What a graph has to give them anew at each replay is in UPDATES.

Source: the documents of torch_npu for ``npu_fused_infer_attention_score`` and ``_npu_paged_attention``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch_npu
from torch import Tensor

CAUSAL, BAND = 3, 4
"""Of ``sparse_mode``: a query sees what comes before it, or only some of that, counted from the sequence's end."""
TEMPLATE = 2048
"""Rows and columns of the mask that both modes take, whatever the lengths."""
EVERYTHING = 2**31 - 1
MOST_PACKED = 4096
"""Sequences that one call takes with their tokens packed."""

HostValues = Mapping[str, Tensor]
Update = Callable[[HostValues], Any]

UPDATES: dict[str, dict[str, Update]] = {
    "npu_fused_infer_attention_score.out": {
        "actual_seq_lengths": lambda values: values["query_start_loc_host"][1:].tolist(),
        "actual_seq_lengths_kv": lambda values: values["kv_lens_host"].tolist(),
    },
    # A copy: torch_npu's queue may read it after the call returned.
    "_npu_paged_attention.default": {"context_lens": lambda values: values["kv_lens_host"].clone()},
}
"""By the operation that torch_npu records in a capture: the keys of its update, each with how it is made."""


def one_query_each(query: Tensor, block_table: Tensor, query_start_loc_host: Tensor) -> bool:
    """Whether every sequence has one query, so that lengths of queries are not needed."""
    sequences = block_table.shape[0]
    return query.shape[0] == sequences and query_start_loc_host.tolist() == list(range(sequences + 1))


class FusedAttention:
    """``paged_attention`` by npu_fused_infer_attention_score.

    Args:
        device: the NPU.
        view: brings a cache into the form that the operation takes: by default ``[blocks, block_size, heads * dim]``.
    """

    def __init__(self, device: torch.device, view: Callable[[Tensor], Tensor] = lambda cache: cache.flatten(2)) -> None:
        # Made now: copied to the device, and a capture would not stand that.
        self._mask = torch.ones(TEMPLATE, TEMPLATE, dtype=torch.bool).triu_(1).to(device)
        self._view = view

    def __call__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_table: Tensor,
        query_start_loc: Tensor,
        kv_lens: Tensor,
        query_start_loc_host: Tensor,
        kv_lens_host: Tensor,
        scale: float,
        causal: bool,
        sliding_window: int | None,
    ) -> Tensor:
        """See :func:`hal.ops.paged_attention`."""
        tokens, heads, head_dim = query.shape
        block_size, kv_heads = key_cache.shape[1], key_cache.shape[2]
        shared: dict[str, Any] = {
            "block_table": block_table,
            "actual_seq_lengths_kv": kv_lens_host.tolist(),
            "num_heads": heads,
            "num_key_value_heads": kv_heads,
            "block_size": block_size,
            "scale": scale,
        }
        keys, values = self._view(key_cache), self._view(value_cache)
        if sliding_window is None and one_query_each(query, block_table, query_start_loc_host):
            attended = torch_npu.npu_fused_infer_attention_score(
                query.reshape(tokens, 1, heads * head_dim), keys, values, input_layout="BSH", **shared
            )[0]
            return attended.view(tokens, heads, head_dim)  # type: ignore[no-any-return]
        if causal:
            shared |= {"atten_mask": self._mask, "sparse_mode": CAUSAL if sliding_window is None else BAND}
            if sliding_window is not None:
                shared |= {"pre_tokens": sliding_window - 1, "next_tokens": 0}
        elif sliding_window is not None:
            shared |= {"atten_mask": self._mask, "sparse_mode": BAND, "pre_tokens": sliding_window - 1,
                       "next_tokens": EVERYTHING}  # fmt: skip
        return torch_npu.npu_fused_infer_attention_score(  # type: ignore[no-any-return]
            query.contiguous(),
            keys,
            values,
            input_layout="TND",
            actual_seq_lengths=query_start_loc_host[1:].tolist(),
            **shared,
        )[0]


class AtbAttention(FusedAttention):
    """Decoding by ATB's paged attention, which takes one query a sequence and no window; the rest as its base."""

    def __call__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_table: Tensor,
        query_start_loc: Tensor,
        kv_lens: Tensor,
        query_start_loc_host: Tensor,
        kv_lens_host: Tensor,
        scale: float,
        causal: bool,
        sliding_window: int | None,
    ) -> Tensor:
        """See :func:`hal.ops.paged_attention`."""
        if sliding_window is not None or not one_query_each(query, block_table, query_start_loc_host):
            return super().__call__(
                query, key_cache, value_cache, block_table, query_start_loc, kv_lens, query_start_loc_host,
                kv_lens_host, scale, causal, sliding_window,
            )  # fmt: skip
        heads, kv_heads = query.shape[1], key_cache.shape[2]
        query = query.contiguous()
        attended = torch.empty_like(query)
        torch_npu._npu_paged_attention(
            query, key_cache, value_cache, kv_heads, heads, scale, block_table, kv_lens_host.clone(), attended
        )
        return attended
