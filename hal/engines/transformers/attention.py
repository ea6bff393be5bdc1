"""Attention functions for transformers' ``AttentionInterface``: over plain tensors, and over its paged cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hal import ops
from hal.errors import OperationError

REFUSED = ("softcap", "position_bias", "s_aux")
"""Arguments of an attention function that change its result, and that hal's operations do not have."""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' ``sdpa`` does, with :func:`hal.ops.scaled_dot_product_attention`.

    Args:
        module: the layer; its ``is_causal`` counts if the argument is None.
        query: ``[batch, num_heads, queries, head_dim]``.
        key: ``[batch, num_kv_heads, keys, head_dim]``.
        value: as ``key``.
        attention_mask: ``[batch, 1, queries, keys]``, bool, or None.
        dropout: must be 0.
        scaling: of the scores; None for ``head_dim ** -0.5``.
        is_causal: whether a query attends only up to its own token, if there is no mask.
        kwargs: what other attention functions need.

    Returns:
        ``[batch, queries, num_heads, head_dim]``, and no weights.

    Raises:
        OperationError: the layer asks for what the operation does not have.
    """
    _check(module, attention_mask, dropout, kwargs)
    queries = query.shape[2]
    causal = (
        queries > 1
        and attention_mask is None
        and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    )
    if causal and key.shape[2] > queries:  # a static cache, of which only the first tokens are filled
        key, value = key[:, :, :queries], value[:, :, :queries]
    if attention_mask is not None:
        attention_mask = attention_mask.expand(query.shape[0], -1, -1, -1)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attended = ops.scaled_dot_product_attention(query, key, value, attention_mask, scale, causal)
    return attended.transpose(1, 2).contiguous(), None


def paged(otherwise: Callable[..., Any], layers: frozenset[int]) -> Callable[..., Any]:
    """Return an attention function over the cache of continuous batching, with :func:`hal.ops.paged_attention`.

    Args:
        otherwise: runs for other modules, and for layers whose cache is no table of blocks, such as a sliding window.
        layers: the ids of the modules that it is for.
    """

    def attend_paged(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        cache = kwargs.get("cache")
        pages = None if cache is None or id(module) not in layers else cache.layer_to_allocator[module.layer_idx]
        if pages is None or not pages.supports_block_table:
            return otherwise(module, query, key, value, attention_mask, **kwargs)  # type: ignore[no-any-return]
        _check(module, None, kwargs.get("dropout", 0.0), kwargs)
        key_cache, value_cache = pages.get_cache_for_block_table(module.layer_idx)
        size = key_cache.shape[1]
        starts, ends = kwargs["cu_seq_lens_q"].int(), kwargs["cu_seq_lens_k"][pages.layer_type]
        lens, written = ends.diff().int(), kwargs["write_index"][pages.index]
        read = kwargs["read_index"][pages.index]
        slots = read if read.numel() else written  # With no token in the cache before, only the new ones are read.
        lens_host, starts_host = lens.cpu(), starts.cpu()
        new, columns = int(starts_host[-1]), -(-int(lens_host.max()) // size)
        rows = [each[0].transpose(0, 1)[:new].contiguous() for each in (query, key, value)]
        ops.store_kv_cache(rows[1], rows[2], key_cache, value_cache, written[:new].int())
        first = ends[:-1, None] + torch.arange(columns, device=query.device) * size
        table = (slots[first.clamp(max=slots.shape[0] - 1).long()] // size).int()
        attended = query.new_zeros(query.shape[2], *rows[0].shape[1:])
        attended[:new] = ops.paged_attention(
            rows[0], key_cache, value_cache, table, starts, lens, starts_host, lens_host, kwargs["scaling"], True, None
        )
        return attended[None], None

    disabled: Callable[..., Any] = torch.compiler.disable(attend_paged)  # It reads lengths on the host.
    return disabled


def _check(module: nn.Module, mask: Tensor | None, dropout: float, others: dict[str, Any]) -> None:
    """Raise OperationError unless hal's attention computes what a layer asks for."""
    asked = [name for name in REFUSED if others.get(name) is not None]
    asked += ["dropout"] if dropout else []
    asked += ["a mask that is not bool [batch, 1, queries, keys]"] if _unlike(mask) else []
    asked += ["attention sinks"] if hasattr(module, "sinks") else []
    if asked:
        raise OperationError(
            f"{type(module).__name__} asks attention for {', '.join(asked)}, which hal's operation does not have",
            "use(model, attention=False) leaves attention to transformers",
        )


def _unlike(mask: Tensor | None) -> bool:
    return mask is not None and (mask.dtype is not torch.bool or mask.dim() != 4 or mask.shape[1] != 1)
