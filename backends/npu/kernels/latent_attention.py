"""Attention to latents: npu_fused_infer_attention_score with a rotary part of queries and keys, else composed.

Packed sequences take the operator's second version: CANN's document of the first, aclnnFusedInferAttentionScoreV3,
limits a sequence to 16 queries, and that of the second has no limit on A2 and A3.

Sources: torch_npu's documentation of ``npu_fused_infer_attention_score`` (MLA); CANN's of
``aclnnFusedInferAttentionScoreV3`` and ``aclnnFusedInferAttentionScoreV4``.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch_npu
from torch import Tensor
from torch.nn import functional

from hal.ops import AttentionOptions
from hal.ops.kernels.composed_attention import joining
from hal.ops.kernels.kernel_table import Kernel
from hal.step.shape import one_query_each

from ..lengths import launch_runs
from .attention import (
    MAX_PACKED,
    SHARED,
    ComposedAttention,
    FusedAttention,
    concatenate,
    reads_on_device,
    refuse_in_capture,
)

OPTIONS = ("causal",)
"""The options of latent attention that CANN's kernel supports."""
RANK, ROPE_DIM, MOST_HEADS = 512, 64, 128
"""The only sizes of a latent and a rotary row, and the most heads, whose number is a power of two."""
LEAST_BLOCK, MOST_BLOCK = 16, 1024
"""What block sizes are a multiple of, and the largest."""
MOST_QUERIES = 16
"""The most queries of a sequence on 950."""

composed = reads_on_device(joining(ComposedAttention()))


def lacks(query: Tensor, query_rope: Tensor, latent_cache: Tensor, *rest: Any) -> tuple[str, ...]:
    """Return what npu_fused_infer_attention_score does not take of a call of ``latent_attention``."""
    _, heads, rank = query.shape
    return lacking(
        (rank == RANK, "latents of {} elements", rank),
        (query_rope.shape[2] == ROPE_DIM, "rotary rows of {} elements", query_rope.shape[2]),
        (0 < heads <= MOST_HEADS, "{} heads", heads),
        (query.dtype is not torch.float32, "queries in {}", query.dtype),
        blocks_taken(latent_cache),
    )


def blocks_taken(cache: Tensor) -> tuple[bool, str, object]:
    """Return the check of a cache's block size for :func:`lacking`."""
    size = cache.shape[1]
    return size % LEAST_BLOCK == 0 and size <= MOST_BLOCK, "blocks of {} tokens", size


def lacking(*checks: tuple[bool, str, object]) -> tuple[str, ...]:
    """Return the texts of the checks that do not hold, with their values."""
    return tuple(text.format(value) for holds, text, value in checks if not holds)


class FusedLatentAttention:
    """``latent_attention`` with npu_fused_infer_attention_score.

    A decode is one call in the layout BSND, and other steps in TND. Other numbers of heads than powers of two are
    padded.

    Args:
        fused: attention on the same device, whose mask it shares.
        prompts: whether a sequence may have more than 16 queries; such steps are composed else.
    """

    def __init__(self, fused: FusedAttention, *, prompts: bool) -> None:
        self._fused, self._prompts = fused, prompts

    def chosen(self, query: Tensor, query_rope: Tensor, latent_cache: Tensor, *rest: Any) -> Kernel:
        """Return the kernel of a call."""
        starts = rest[4].tolist()
        fits = (
            not lacks(query, query_rope, latent_cache)
            and len(starts) - 1 <= MAX_PACKED
            and (self._prompts or max(after - before for before, after in pairwise(starts)) <= MOST_QUERIES)
        )
        return self._attend if fits else composed

    def __call__(self, *arguments: Any) -> Tensor:
        """See :func:`hal.ops.latent_attention`."""
        return self.chosen(*arguments)(*arguments)  # type: ignore[no-any-return]

    def _attend(
        self,
        query: Tensor,
        query_rope: Tensor,
        latent_cache: Tensor,
        rope_cache: Tensor,
        block_table: Tensor,
        query_start_loc: Tensor,
        kv_lens: Tensor,
        query_start_loc_host: Tensor,
        kv_lens_host: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        tokens, heads, _ = query.shape
        starts, lens = query_start_loc_host.tolist(), kv_lens_host.tolist()
        if starts[-1] == 0:
            return torch.zeros_like(query, memory_format=torch.contiguous_format)
        if padding := (1 << (heads - 1).bit_length()) - heads:
            query, query_rope = (functional.pad(each, (0, 0, 0, padding)) for each in (query, query_rope))
        query, query_rope, block_table = (each.contiguous() for each in (query, query_rope, block_table))
        arguments: dict[str, Any] = {"num_key_value_heads": 1, "block_size": latent_cache.shape[1]}
        if one_query_each(tokens, starts):
            attended: Tensor = torch_npu.npu_fused_infer_attention_score(
                query.unsqueeze(1),
                latent_cache,
                latent_cache,
                query_rope=query_rope.unsqueeze(1),
                key_rope=rope_cache,
                num_heads=heads + padding,
                scale=options.scale,
                input_layout="BSND",
                block_table=block_table,
                actual_seq_lengths_kv=lens,
                **arguments,
            )[0].squeeze(1)
            return attended[:, :heads] if padding else attended
        arguments |= self._fused.mask_arguments(options)
        runs = list(launch_runs(slice(0, len(lens)), lens, latent_cache.shape[1], len(latent_cache)))
        if len(runs) > 1:
            refuse_in_capture(*SHARED)
        parts = []
        for rows in runs:
            first, *ends = starts[rows.start : rows.stop + 1]
            if ends[-1] == first:
                continue
            part = torch_npu.npu_fused_infer_attention_score_v2(
                query[first : ends[-1]],
                latent_cache,
                latent_cache,
                query_rope=query_rope[first : ends[-1]],
                key_rope=rope_cache,
                num_query_heads=heads + padding,
                softmax_scale=options.scale,
                input_layout="TND",
                block_table=block_table[rows],
                actual_seq_qlen=[end - first for end in ends],
                actual_seq_kvlen=lens[rows],
                **arguments,
            )[0]
            parts.append(part[:, :heads])
        return concatenate(parts, tokens)
