"""Attention over the paged cache: npu_fused_infer_attention_score, and ATB's paged attention as an alternative.

Both read lengths on the host, when they are launched: see lengths.py.

Source: the documents of torch_npu for ``npu_fused_infer_attention_score`` and ``_npu_paged_attention``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import groupby, pairwise
from typing import Any

import torch
import torch_npu
from torch import Tensor
from torch.nn import functional

from hal import ops
from hal.errors import CaptureError, OperationError
from hal.ops.kernels.kernel_table import Kernel
from hal.step.batch import one_query_each

from ..lengths import fitting
from ..soc import BLOCK_SIZES

CAUSAL, BAND = 3, 4
"""Of ``sparse_mode``: a query sees what comes before it, or only some of that, counted from the sequence's end."""
TEMPLATE = 2048
"""Rows and columns of the mask that both modes take, whatever the lengths."""
EVERYTHING = 2**31 - 1
PACKED_HEAD_DIM, PACKED_DTYPE = 128, torch.bfloat16
"""Of what the layout TND takes, whose sequences lie one after another: what every release of CANN does."""
MOST_PACKED = 4096
"""Sequences that one call takes so."""
LONGEST_DECODED = 262144
"""Keys that one query can meet."""
ATB_HEAD_DIM, ATB_WIDE, ATB_BLOCK = 576, 256, 128
"""The widest head that ATB takes; the widest that is not bound to blocks of at most 128 slots; and those slots."""

SHARED = (
    "sequences that share blocks, and have more than the cache if those are counted for each,",
    "make the cache larger, or capture smaller batches",
)
UNEVEN = (
    "sequences with different numbers of queries",
    f"capture decode steps only, or a model in bfloat16 with a head dimension of {PACKED_HEAD_DIM}",
)
"""What a capture does not take, and what to do."""


class FusedAttention:
    """``paged_attention`` by npu_fused_infer_attention_score.

    A decode is one call, in the layout BSH. So is a prefill, in TND, if that takes the head dimension and the dtype;
    else it is a call in BSH for each run of sequences with as many queries. Sequences that share blocks, so that they
    have more than the cache if those are counted for each, are prefilled in several calls.

    Args:
        device: the NPU.
        view: brings a cache into the form that the operation takes: by default ``[blocks, block_size, heads * dim]``.
        otherwise: computes a prefill over blocks of a size that BSH does not take: by default the reference.
    """

    def __init__(
        self,
        device: torch.device,
        view: Callable[[Tensor], Tensor] = lambda cache: cache.flatten(2),
        otherwise: Kernel | None = None,
    ) -> None:
        # Made now: copied to the device, and a capture would not stand that.
        self._mask = torch.ones(TEMPLATE, TEMPLATE, dtype=torch.bool).triu_(1).to(device)
        self._slots = torch.arange(LONGEST_DECODED, dtype=torch.int32).to(device)
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
        scale: float,
        causal: bool,
        sliding_window: int | None,
    ) -> Tensor:
        """See :func:`hal.ops.paged_attention`."""
        tokens, heads, head_dim = query.shape
        block_size, kv_heads = key_cache.shape[1], key_cache.shape[2]
        starts, lens = query_start_loc_host.tolist(), kv_lens_host.tolist()
        if starts[-1] == 0:
            return torch.zeros_like(query, memory_format=torch.contiguous_format)
        attend = partial(
            torch_npu.npu_fused_infer_attention_score,
            num_heads=heads,
            num_key_value_heads=kv_heads,
            block_size=block_size,
            scale=scale,
        )
        caches = self._view(key_cache), self._view(value_cache)
        query, block_table = query.contiguous(), block_table.contiguous()
        packs = head_dim == PACKED_HEAD_DIM and query.dtype is PACKED_DTYPE and len(lens) <= MOST_PACKED
        decodes = one_query_each(tokens, starts)
        if packs and not (decodes and sliding_window is None):
            runs = list(fitting(slice(0, len(lens)), lens, block_size, len(key_cache)))
            if len(runs) > 1:
                _refuse_in_capture(*SHARED)
            parts = []
            for rows in runs:
                first, *ends = starts[rows.start : rows.stop + 1]
                if ends[-1] == first:
                    continue
                attended = attend(
                    query[first : ends[-1]],  # it must be given all the queries, and no more
                    *caches,
                    input_layout="TND",
                    block_table=block_table[rows],
                    actual_seq_lengths=[end - first for end in ends],
                    actual_seq_lengths_kv=lens[rows],
                    **self._hiding(causal, sliding_window),
                )[0]
                parts.append(attended)
            return _together(parts, tokens)

        counts = [(1, slice(0, tokens))] if decodes else _runs(starts)
        if block_size not in BLOCK_SIZES and any(queries > 1 for queries, _ in counts):
            return self._otherwise(  # type: ignore[no-any-return]
                query, key_cache, value_cache, block_table, query_start_loc, kv_lens, query_start_loc_host,
                kv_lens_host, scale, causal, sliding_window,
            )  # fmt: skip
        if len(counts) > 1:
            _refuse_in_capture(*UNEVEN)
        parts = []
        for queries, run in counts:
            if queries == 0:
                continue
            groups = [run] if queries == 1 else list(fitting(run, lens, block_size, len(key_cache)))
            if len(groups) > 1:
                _refuse_in_capture(*SHARED)
            for rows in groups:
                part = query[starts[rows.start] : starts[rows.stop]]
                hiding = self._hiding(causal, sliding_window)
                if queries == 1:
                    hiding = self._hiding_slots(block_table[rows], block_size, kv_lens[rows], sliding_window)
                attended = attend(
                    part.view(-1, queries, heads * head_dim),
                    *caches,
                    input_layout="BSH",
                    block_table=block_table[rows],
                    actual_seq_lengths_kv=lens[rows],
                    **hiding,
                )[0]
                parts.append(attended.view(part.shape))
        return _together(parts, tokens)

    def _hiding(self, causal: bool, window: int | None) -> dict[str, Any]:
        """What hides keys from queries, where a sequence has more than one."""
        if window is not None:
            after = 0 if causal else EVERYTHING
            return {"atten_mask": self._mask, "sparse_mode": BAND, "pre_tokens": window - 1, "next_tokens": after}
        return {"atten_mask": self._mask, "sparse_mode": CAUSAL} if causal else {}

    def _hiding_slots(
        self, block_table: Tensor, block_size: int, kv_lens: Tensor, window: int | None
    ) -> dict[str, Any]:
        """The same for one query a sequence, where only a mask of all slots counts: modes and windows are ignored."""
        if window is None:
            return {}
        slots = block_table.shape[1] * block_size
        if slots > LONGEST_DECODED:
            raise OperationError(
                f"a decode with a sliding window over a block table of {slots} slots a sequence, where one query meets "
                f"at most {LONGEST_DECODED} keys",
                f"give the table at most {LONGEST_DECODED // block_size} columns, as for sequences of that length",
            )
        return {"atten_mask": self._slots[:slots] < (kv_lens - window)[:, None]}


def _runs(starts: list[int]) -> list[tuple[int, slice]]:
    """Runs of sequences with as many queries each: how many, and of which sequences."""
    runs, row = [], 0
    for queries, run in groupby(after - before for before, after in pairwise(starts)):
        first, row = row, row + len(list(run))
        runs.append((queries, slice(first, row)))
    return runs


def _together(parts: list[Tensor], tokens: int) -> Tensor:
    """One after another, with rows of 0 for the tokens that no sequence owns."""
    attended = parts[0] if len(parts) == 1 else torch.cat(parts)
    left = tokens - attended.shape[0]
    return functional.pad(attended, (0, 0, 0, 0, 0, left)) if left else attended


def _refuse_in_capture(what: str, instead: str) -> None:
    if torch_npu.npu.is_current_stream_capturing():
        raise CaptureError(f"{what} take several launches of attention, whose lengths no replay can set apart", instead)


def _atb_takes(head_dim: int, block_size: int) -> bool:
    """Source: ascend-transformer-boost, pagedattention/tiling/paged_attention_tiling.cpp, for A2 and A3."""
    if head_dim > ATB_WIDE:
        return head_dim <= ATB_HEAD_DIM and block_size <= ATB_BLOCK
    if head_dim == ATB_WIDE and block_size >= ATB_BLOCK:
        return block_size % ATB_BLOCK == 0
    return head_dim * block_size <= ATB_BLOCK * ATB_BLOCK


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
        tokens, heads, head_dim = query.shape
        block_size, kv_heads = key_cache.shape[1], key_cache.shape[2]
        if (
            not tokens
            or not _atb_takes(head_dim, block_size)
            or sliding_window is not None
            or not one_query_each(tokens, query_start_loc_host.tolist())
        ):
            return super().__call__(
                query, key_cache, value_cache, block_table, query_start_loc, kv_lens, query_start_loc_host,
                kv_lens_host, scale, causal, sliding_window,
            )  # fmt: skip
        query = query.contiguous()
        attended = torch.empty_like(query)
        torch_npu._npu_paged_attention(
            query, key_cache, value_cache, kv_heads, heads, scale, block_table, kv_lens_host.clone(), attended
        )
        return attended
