"""Launches of npu_fused_infer_attention_score: equally many queries of each sequence, or packed sequences."""

from __future__ import annotations

from typing import Any

import torch
import torch_npu
from torch import Tensor

from hal.ops import AttentionOptions


def attend_alike(
    query: Tensor,
    queries: int,
    keys: Tensor,
    values: Tensor,
    sinks: Tensor | None,
    options: AttentionOptions,
    **arguments: Any,
) -> Tensor:
    """Attend with as many queries of each sequence, in the layout BSH, or one in BNSD where a cache has 4 dimensions.

    Args:
        query: ``[sequences * queries, num_heads, head_dim]``.
        queries: of each sequence.
        keys: the cache, in the operation's shape.
        values: as ``keys``.
        sinks: ``[num_heads]``, or None.
        options: of the operation.
        arguments: further ones of npu_fused_infer_attention_score.
    """
    _, heads, head_dim = query.shape
    by_head = keys.dim() == 4
    attended, sums = torch_npu.npu_fused_infer_attention_score(
        query.view(-1, *((heads, 1, head_dim) if by_head else (queries, heads * head_dim))),
        keys,
        values,
        num_heads=heads,
        scale=options.scale,
        input_layout="BNSD" if by_head else "BSH",
        softmax_lse_flag=sinks is not None,
        **arguments,
    )
    attended = attended.view(query.shape)
    return attended if sinks is None else _with_sinks(attended, sums, sinks)


def attend_packed(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    sinks: Tensor | None,
    options: AttentionOptions,
    *,
    ends: list[int],
    lens: list[int],
    **arguments: Any,
) -> Tensor:
    """Attend with packed sequences, in the layout TND. Only the operation's second version has sinks.

    Args:
        query: ``[tokens, num_heads, head_dim]``.
        keys: the cache, in the operation's shape.
        values: as ``keys``.
        sinks: ``[num_heads]``, or None.
        options: of the operation.
        ends: the end of each sequence's queries.
        lens: the length of each sequence.
        arguments: those that both versions of the operation have.
    """
    heads, scale, arguments = query.shape[1], options.scale, {"input_layout": "TND", **arguments}
    if sinks is None:
        return torch_npu.npu_fused_infer_attention_score(  # type: ignore[no-any-return]
            query,
            keys,
            values,
            num_heads=heads,
            scale=scale,
            actual_seq_lengths=ends,
            actual_seq_lengths_kv=lens,
            **arguments,
        )[0]
    return torch_npu.npu_fused_infer_attention_score_v2(  # type: ignore[no-any-return]
        query,
        keys,
        values,
        num_query_heads=heads,
        softmax_scale=scale,
        actual_seq_qlen=ends,
        actual_seq_kvlen=lens,
        learnable_sink=sinks.contiguous(),
        **arguments,
    )[0]


def _with_sinks(attended: Tensor, sums: Tensor, sinks: Tensor) -> Tensor:
    """Add sinks to the softmax afterwards: they scale the result by ``exp(sum) / (exp(sum) + exp(sink))``.

    Args:
        attended: ``[tokens, num_heads, head_dim]``, attention without sinks.
        sums: ``[sequences, num_heads, queries, 1]``, the logarithms of the sums of exponentials; infinity for no key.
        sinks: ``[num_heads]``.
    """
    share = torch.sigmoid(sums.transpose(1, 2).reshape(*attended.shape[:2], 1) - sinks.float()[:, None])
    return (attended * share).to(attended.dtype)
