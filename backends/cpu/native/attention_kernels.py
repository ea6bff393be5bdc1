"""Python bindings of the C++ kernels of attention over a paged cache, and of a cache in 8 bits."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from hal.errors import OperationError
from hal.ops import AttentionOptions

from ..kernels import paged_attention as composed_attention
from ..kernels import quantized_paged_attention as composed_quantized_attention
from .arguments import DTYPES, Bindings, addresses, empty, integers, require, rows

ATTENTION_KERNELS = ("paged_attention", "quantized_paged_attention", "store_quantized_kv_cache")
FEW = 1 << 11
"""Queries times tokens of a sequence above which the kernel of many queries is faster. Decode steps do not use it."""
UNLIMITED = 1 << 62
"""A window or a bound that excludes nothing."""
QUANTIZED = {torch.int8: False, torch.uint8: True}
"""Whether a quantized cache of a dtype has float8 numbers."""


class AttentionKernels(Bindings):
    """The bindings, as :mod:`.kernels` describes them.

    Args:
        library: the C++ kernels.
        few: queries times tokens of a sequence above which the kernel of many queries runs.
    """

    def __init__(self, library: ctypes.CDLL, few: int = FEW) -> None:
        super().__init__(library)
        self._few = few
        numbers = c_int, *[c_int64] * 10, c_float, c_float, c_int, c_int64, c_int64
        self._attention = self.function(
            "paged_attention", c_int64, *[c_void_p] * 8, *numbers, c_void_p, c_void_p, c_int
        )
        self._store = self.function("store_quantized_kv_cache", c_int64, *[c_void_p] * 9, c_int, c_int, *[c_int64] * 8)

    def store_quantized_kv_cache(
        self,
        key: Tensor,
        value: Tensor,
        key_scale: Tensor | None,
        value_scale: Tensor | None,
        keys: Tensor,
        values: Tensor,
        key_scales: Tensor,
        value_scales: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        """See :func:`hal.ops.store_quantized_kv_cache`.

        Raises:
            OperationError: a slot is outside the cache, or shapes or dtypes differ.
        """
        name, heads = "store_quantized_kv_cache", key.shape[1]
        alike = key.shape == value.shape and key.dtype is value.dtype and keys.shape[2:] == key.shape[1:]
        require(alike and _paired(keys, values, key_scales, value_scales), name, key, value, keys, key_scales)
        slots = integers(slot_mapping, "slot_mapping")
        require(slots.shape == key.shape[:1], name, key, indices=(slots,))
        given = [None if each is None else each.contiguous() for each in (key_scale, value_scale)]
        for each in given:
            if each is not None:
                fits = each.shape == (heads,) and each.dtype is torch.float32
                require(fits, name, key, each)
        key, value = (each if each.stride(2) == 1 else each.contiguous() for each in (key, value))
        wrong = self._store(
            *addresses(key, value, *given, keys, values, key_scales, value_scales, slots),
            DTYPES[key.dtype],
            QUANTIZED[keys.dtype],
            key.shape[0],
            keys.shape[0] * keys.shape[1],
            heads,
            key.shape[2],
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
        )
        if wrong:
            raise OperationError(
                f"{name}: token {wrong - 1} has slot {int(slots[wrong - 1])}, outside the cache of "
                f"{keys.shape[0] * keys.shape[1]} slots",
                "check the batch's slot_mapping",
            )

    def paged_attention(
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
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """See :func:`hal.ops.paged_attention`. Sequences with many queries have another kernel.

        In bfloat16 on a CPU that multiplies pairs, this one rounds weights to bfloat16, as flash attention does. Chunks
        and position biases are composed of torch's operations.

        Raises:
            OperationError: a sequence is outside its block table or the cache, or shapes or dtypes differ.
        """
        lengths = query_start_loc_host, kv_lens_host
        if options.chunk is not None or options.alibi is not None:
            found = composed_attention(
                query, key_cache, value_cache, block_table, query_start_loc, kv_lens, *lengths, sinks, options
            )
            return found if out is None else out.copy_(found)
        alike = query.dtype is key_cache.dtype is value_cache.dtype and key_cache.shape == value_cache.shape
        canonical = alike and key_cache.is_contiguous() and value_cache.is_contiguous()
        require(canonical, "paged_attention", query, key_cache, value_cache)
        return self._attend(
            "paged_attention", query, (key_cache, value_cache), block_table, lengths, sinks, options, out
        )

    def quantized_paged_attention(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        key_scales: Tensor,
        value_scales: Tensor,
        block_table: Tensor,
        query_start_loc: Tensor,
        kv_lens: Tensor,
        query_start_loc_host: Tensor,
        kv_lens_host: Tensor,
        sinks: Tensor | None,
        options: AttentionOptions,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """See :func:`hal.ops.quantized_paged_attention`, and :meth:`paged_attention`.

        A few positions at a time are rounded to query's dtype, in a core's cache.

        Raises:
            OperationError: a sequence is outside its block table or the cache, or shapes or dtypes differ.
        """
        cache, lengths = (keys, values, key_scales, value_scales), (query_start_loc_host, kv_lens_host)
        if options.chunk is not None or options.alibi is not None:
            found = composed_quantized_attention(
                query, *cache, block_table, query_start_loc, kv_lens, *lengths, sinks, options
            )
            return found if out is None else out.copy_(found)
        name = "quantized_paged_attention"
        require(_paired(*cache), name, query, *cache)
        return self._attend(name, query, cache, block_table, lengths, sinks, options, out)

    def _attend(
        self,
        name: str,
        query: Tensor,
        cache: tuple[Tensor, ...],
        block_table: Tensor,
        lengths: tuple[Tensor, Tensor],
        sinks: Tensor | None,
        options: AttentionOptions,
        out: Tensor | None,
    ) -> Tensor:
        tokens, heads, head_dim = query.shape
        sequences, max_blocks = block_table.shape
        keys, values, *scales = cache
        num_blocks, block_size, kv_heads, _ = keys.shape
        require(keys.shape[3] == head_dim and heads % kv_heads == 0, name, query, keys)
        table, starts = integers(block_table, "block_table"), integers(lengths[0], "query_start_loc_host")
        lens = integers(lengths[1], "kv_lens_host")
        fits = starts.shape == (sequences + 1,) and lens.shape == (sequences,)
        require(fits, name, query, indices=(table, starts, lens))
        if sinks is not None:
            fits = sinks.shape == (heads,) and sinks.dtype is query.dtype
            require(fits, name, query, sinks)
            sinks = sinks.contiguous()
        query, (_, outer, inner) = rows(query)
        y = empty(query.shape, query) if out is None else out
        work = self._few if tokens > sequences else UNLIMITED
        sizes = sequences, tokens, heads, kv_heads, head_dim, num_blocks, block_size, max_blocks, outer, inner
        wrong = self._attention(
            *addresses(query, keys, values, table, starts, lens, sinks, y),
            DTYPES[query.dtype],
            *sizes,
            options.scale,
            options.softcap or 0.0,
            options.causal,
            UNLIMITED if options.window is None else options.window,
            work,
            *((None, None) if not scales else (each.data_ptr() for each in scales)),
            bool(scales) and QUANTIZED[keys.dtype],
        )
        if wrong:
            raise OperationError(
                f"{name}: sequence {wrong - 1} has {int(lens[wrong - 1])} tokens in the blocks "
                f"{table[wrong - 1].tolist()} of a cache of {num_blocks} blocks of {block_size}",
                "check the batch's block_table and lengths",
            )
        return y


def _paired(keys: Tensor, values: Tensor, key_scales: Tensor, value_scales: Tensor) -> bool:
    """Return whether the tensors of a quantized cache fit one another."""
    alike = keys.shape == values.shape and keys.dtype is values.dtype and keys.dtype in QUANTIZED
    scaled = key_scales.shape == value_scales.shape == keys.shape[:3]
    scaled = scaled and key_scales.dtype is value_scales.dtype is torch.float32
    return alike and scaled and all(each.is_contiguous() for each in (keys, values, key_scales, value_scales))
