"""Attention over the paged cache: npu_fused_infer_attention_score, and ATB's paged attention as an alternative.

Both read lengths on the host at launch: see lengths.py.

Source: torch_npu's documentation of ``npu_fused_infer_attention_score`` and ``_npu_paged_attention``.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby, pairwise
from typing import Any

import torch
import torch_npu
from torch import Tensor
from torch.nn import functional

from hal import ops
from hal.errors import CaptureError, OperationError
from hal.ops import AttentionOptions
from hal.ops.kernels.composed_attention import decode, one_by_one
from hal.ops.kernels.kernel_table import Kernel
from hal.step.shape import one_query_each

from ..lengths import launch_runs
from ..soc import BLOCK_SIZES
from .attention_launches import attend_alike, attend_packed

CAUSAL, BAND = 3, 4
"""Values of ``sparse_mode``: causal, and a band of keys. Both align the last query with the last key."""
MASK_SIZE = 2048
"""Rows and columns of the mask that both modes require, independent of the lengths."""
PACKED_HEAD_DIM, PACKED_DTYPE = 128, torch.bfloat16
"""Head dimension and dtype that every release of CANN supports in TND, the layout of packed sequences."""
SINK_HEAD_DIMS = (64, 128)
"""Head dimensions for which npu_fused_infer_attention_score_v2 supports sinks, in TND and in bfloat16."""
MAX_PACKED = 4096
"""Maximum number of sequences in one call with the layout TND."""
MAX_DECODE_KEYS = 262144
"""Maximum number of keys for one query."""
ATB_HEAD_DIM, ATB_WIDE, ATB_BLOCK = 576, 256, 128
"""ATB's maximum head dimension. Head dimensions above ATB_WIDE require blocks of at most ATB_BLOCK tokens."""

OPTIONS = ("causal", "window", "sinks")
"""The options of attention that CANN's kernels support."""

SEVERAL = "need several launches of attention, and a replay can update only one"
SHARED = (
    f"sequences that share blocks and have more blocks in total than the cache {SEVERAL}",
    "make the cache larger, or capture smaller batches",
)
LONGER = (
    "sequences that are longer than the cache run without fused attention, and a replay would not update their lengths",
    "make the cache larger, or capture shorter sequences",
)
COMPOSED = (
    "attention with these options is composed of smaller operations, and for a prefill, their shapes are the lengths",
    "capture decode steps only",
)
UNEVEN = (
    f"sequences with different numbers of queries {SEVERAL}",
    f"capture decode steps only, or a model in bfloat16 with a head dimension of {PACKED_HEAD_DIM}",
)
"""Batches that a capture does not support, each with its remedy."""


class FusedAttention:
    """``paged_attention`` with npu_fused_infer_attention_score, without softcaps.

    A decode is one call in the layout BSH. A prefill is one call in TND if TND supports the head dimension and dtype;
    otherwise it is one call in BSH for each run of sequences with equally many queries. A prefill is split further if
    its sequences share blocks and their block counts add up to more than the cache has. With a window, a single
    sequence may have more, since its first blocks are given away. With sinks, TND is used wherever it supports them; in
    BSH, they are added to the result.

    Args:
        device: the NPU.
        view: converts a cache to the operation's shape: by default ``[blocks, block_size, heads * dim]``.
        otherwise: the kernel for a prefill with a block size that BSH does not support, or with a sequence that is
            longer than the cache: by default the reference.
    """

    def __init__(
        self,
        device: torch.device,
        view: Callable[[Tensor], Tensor] = lambda cache: cache.flatten(2),
        otherwise: Kernel | None = None,
    ) -> None:
        # Copied to the device here, because a capture does not allow the copy.
        self._mask = torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool).triu_(1).to(device)
        self._slots = torch.arange(MAX_DECODE_KEYS, dtype=torch.int32).to(device)
        self._view = view
        self._otherwise = otherwise or ops.operation("paged_attention").reference

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
        sinks: Tensor | None,
        options: AttentionOptions,
    ) -> Tensor:
        """See :func:`hal.ops.paged_attention`."""
        tokens, _, head_dim = query.shape
        block_size, kv_heads = key_cache.shape[1], key_cache.shape[2]
        starts, lens = query_start_loc_host.tolist(), kv_lens_host.tolist()
        if starts[-1] == 0:
            return torch.zeros_like(query, memory_format=torch.contiguous_format)
        caches = self._view(key_cache), self._view(value_cache)
        query, block_table = query.contiguous(), block_table.contiguous()
        decodes = one_query_each(tokens, starts)
        # Only with a window. Lengths are symbolic while a graph is traced; replays check the actual ones.
        longer = bool(options.window) and type(lens[0]) is int and max(lens) > block_size * len(key_cache)
        dims = (PACKED_HEAD_DIM,) if sinks is None else SINK_HEAD_DIMS
        packs = head_dim in dims and query.dtype is PACKED_DTYPE and len(lens) <= MAX_PACKED and not longer
        if packs and not (decodes and options.window is None and sinks is None):
            runs = list(launch_runs(slice(0, len(lens)), lens, block_size, len(key_cache)))
            if len(runs) > 1:
                refuse_in_capture(*SHARED)
            parts = []
            for rows in runs:
                first, *ends = starts[rows.start : rows.stop + 1]
                if ends[-1] == first:
                    continue
                attended = attend_packed(
                    query[first : ends[-1]],  # the lengths must add up to the number of queries
                    *caches,
                    sinks,
                    options,
                    num_key_value_heads=kv_heads,
                    block_size=block_size,
                    block_table=block_table[rows],
                    ends=[end - first for end in ends],
                    lens=lens[rows],
                    **self.mask_arguments(options),
                )
                parts.append(attended)
            return concatenate(parts, tokens)

        counts = [(1, slice(0, tokens))] if decodes else _runs(starts)
        if (longer or block_size not in BLOCK_SIZES) and any(queries > 1 for queries, _ in counts):
            if longer:
                refuse_in_capture(*LONGER)
            cache = key_cache, value_cache, block_table
            lengths = query_start_loc, kv_lens, query_start_loc_host, kv_lens_host
            return self._otherwise(query, *cache, *lengths, sinks, options)  # type: ignore[no-any-return]
        if len(counts) > 1:
            refuse_in_capture(*UNEVEN)
        parts = []
        for queries, run in counts:
            if queries == 0:
                continue
            groups = [run] if queries == 1 else list(launch_runs(run, lens, block_size, len(key_cache)))
            if len(groups) > 1:
                refuse_in_capture(*SHARED)
            for rows in groups:
                part = query[starts[rows.start] : starts[rows.stop]]
                mask = self.mask_arguments(options)
                if queries == 1:
                    mask = self._decode_mask_arguments(block_table[rows], block_size, kv_lens[rows], options.window)
                attended = attend_alike(
                    part,
                    queries,
                    *caches,
                    sinks,
                    options,
                    num_key_value_heads=kv_heads,
                    block_table=block_table[rows],
                    block_size=block_size,
                    actual_seq_lengths_kv=lens[rows],
                    **mask,
                )
                parts.append(attended)
        return concatenate(parts, tokens)

    def decode(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        block_table: Tensor,
        kv_lens: Tensor,
        lens: list[int],
        sinks: Tensor | None,
        options: AttentionOptions,
        *,
        block_size: int,
        **arguments: Any,
    ) -> Tensor:
        """Attend with one query per sequence.

        Args:
            query: ``[sequences, num_heads, head_dim]``, contiguous.
            keys: the cache, in the operation's shape.
            values: as ``keys``.
            block_table: of the operation, contiguous.
            kv_lens: of the operation.
            lens: ``kv_lens_host`` as a list.
            sinks: of the operation.
            options: of the operation.
            block_size: tokens per block.
            arguments: further ones of npu_fused_infer_attention_score.
        """
        mask = self._decode_mask_arguments(block_table, block_size, kv_lens, options.window)
        paging = {"block_table": block_table, "block_size": block_size, "actual_seq_lengths_kv": lens}
        return attend_alike(query, 1, keys, values, sinks, options, **paging, **mask, **arguments)

    def mask_arguments(self, options: AttentionOptions) -> dict[str, Any]:
        """Return the mask arguments for sequences with more than one query."""
        if options.window is not None:
            before, after = options.window - 1, 0 if options.causal else options.window - 1
            return {"atten_mask": self._mask, "sparse_mode": BAND, "pre_tokens": before, "next_tokens": after}
        return {"atten_mask": self._mask, "sparse_mode": CAUSAL} if options.causal else {}

    def _decode_mask_arguments(
        self, block_table: Tensor, block_size: int, kv_lens: Tensor, window: int | None
    ) -> dict[str, Any]:
        """Return the mask arguments for one query per sequence, where the operation ignores sparse modes.

        A window requires a mask over all slots of the block table.

        Raises:
            OperationError: the block table has more slots than the operation supports keys.
        """
        if window is None:
            return {}
        slots = block_table.shape[1] * block_size
        if slots > MAX_DECODE_KEYS:
            raise OperationError(
                f"a decode with a sliding window has a block table of {slots} slots per sequence; the limit is "
                f"{MAX_DECODE_KEYS}",
                f"give the block table at most {MAX_DECODE_KEYS // block_size} columns",
            )
        return {"atten_mask": self._slots[:slots] < (kv_lens - window)[:, None]}


def reads_on_device(kernel: Kernel) -> Kernel:
    """Return a kernel that reads lengths on the device, as :class:`ComposedAttention` does."""
    kernel.updates = False  # type: ignore[attr-defined]
    return kernel


class ComposedAttention:
    """``paged_attention`` for options that CANN's attention lacks, in smaller operations.

    A decode reads lengths on the device, so graphs capture it without updates.
    """

    updates = False

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
        sinks: Tensor | None,
        options: AttentionOptions,
    ) -> Tensor:
        """See :func:`hal.ops.paged_attention`."""
        starts = query_start_loc_host.tolist()
        if one_query_each(query.shape[0], starts):
            return decode(query, key_cache, value_cache, block_table, kv_lens, sinks, options)
        refuse_in_capture(*COMPOSED)
        lengths = kv_lens_host.tolist()
        return one_by_one(query, key_cache, value_cache, block_table, starts, lengths, sinks, options)


def _runs(starts: list[int]) -> list[tuple[int, slice]]:
    """Return the runs of sequences with equally many queries, each as that number and a slice of sequences."""
    runs, row = [], 0
    for queries, run in groupby(after - before for before, after in pairwise(starts)):
        first, row = row, row + len(list(run))
        runs.append((queries, slice(first, row)))
    return runs


def concatenate(parts: list[Tensor], tokens: int) -> Tensor:
    """Concatenate the parts, and append rows of 0 for padding tokens."""
    attended = parts[0] if len(parts) == 1 else torch.cat(parts)
    left = tokens - attended.shape[0]
    return functional.pad(attended, (0, 0, 0, 0, 0, left)) if left else attended


def refuse_in_capture(reason: str, remedy: str) -> None:
    """Raise CaptureError if the current stream is capturing."""
    if torch_npu.npu.is_current_stream_capturing():
        raise CaptureError(reason, remedy)


def _atb_takes(head_dim: int, block_size: int) -> bool:
    """Return whether ATB supports the sizes.

    Source: ascend-transformer-boost, pagedattention/tiling/paged_attention_tiling.cpp, for A2 and A3.
    """
    if head_dim > ATB_WIDE:
        return head_dim <= ATB_HEAD_DIM and block_size <= ATB_BLOCK
    if head_dim == ATB_WIDE and block_size >= ATB_BLOCK:
        return block_size % ATB_BLOCK == 0
    return head_dim * block_size <= ATB_BLOCK * ATB_BLOCK


class AtbAttention(FusedAttention):
    """Decode with ATB's paged attention, for one query per sequence without window or sinks; else the base class."""

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
        sinks: Tensor | None,
        options: AttentionOptions,
    ) -> Tensor:
        """See :func:`hal.ops.paged_attention`."""
        tokens, heads, head_dim = query.shape
        block_size, kv_heads = key_cache.shape[1], key_cache.shape[2]
        if (
            not tokens
            or not _atb_takes(head_dim, block_size)
            or options.window is not None
            or sinks is not None
            or not one_query_each(tokens, query_start_loc_host.tolist())
        ):
            cache = key_cache, value_cache, block_table
            lengths = query_start_loc, kv_lens, query_start_loc_host, kv_lens_host
            return super().__call__(query, *cache, *lengths, sinks, options)
        query = query.contiguous()
        attended = torch.empty_like(query)
        torch_npu._npu_paged_attention(
            query, key_cache, value_cache, kv_heads, heads, options.scale, block_table, kv_lens_host.clone(), attended
        )
        return attended
