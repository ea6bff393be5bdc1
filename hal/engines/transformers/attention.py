"""The attention function for transformers' ``AttentionInterface``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hal import ops
from hal.errors import OperationError

REFUSED = ("position_bias", "attention_bias", "alibi")
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
        kwargs: ``softcap`` and ``s_aux``, the sinks, and what other attention functions need.

    Returns:
        ``[batch, queries, num_heads, head_dim]``, and no weights.

    Raises:
        OperationError: the layer asks for what the operation does not have.
    """
    check(module, attention_mask, dropout, kwargs)
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
    attended = ops.scaled_dot_product_attention(
        query, key, value, attention_mask, scale, causal, kwargs.get("softcap") or None, sinks_of(query, kwargs)
    )
    return attended.transpose(1, 2).contiguous(), None


def check(module: nn.Module, mask: Tensor | None, dropout: float, others: dict[str, Any]) -> None:
    """Raise OperationError unless hal's attention computes what a layer asks for."""
    asked = [name for name in REFUSED if others.get(name) is not None]
    asked += ["dropout"] if dropout else []
    asked += ["a mask that is not bool [batch, 1, queries, keys]"] if _unlike(mask) else []
    asked += ["attention sinks"] if hasattr(module, "sinks") and others.get("s_aux") is None else []
    if asked:
        raise OperationError(
            f"{type(module).__name__} asks attention for {', '.join(asked)}, which hal's operation does not have",
            "use(model, attention=False) leaves attention to transformers",
        )


def sinks_of(query: Tensor, others: dict[str, Any]) -> Tensor | None:
    """Return the sinks of a layer in the dtype of its queries, or None."""
    sinks: Tensor | None = others.get("s_aux")
    return None if sinks is None else sinks.to(query.dtype)


def _unlike(mask: Tensor | None) -> bool:
    return mask is not None and (mask.dtype is not torch.bool or mask.dim() != 4 or mask.shape[1] != 1)
