"""Python bindings of the C++ kernels of latent and of sparse attention."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from hal.errors import OperationError
from hal.ops import AttentionOptions
from hal.ops.kernels.composed_attention import joining
from hal.ops.selection import check_budget

from .arguments import DTYPES, Bindings, addresses, empty, integers, require, rows
from .attention_kernels import AttentionKernels

SELECTION_KERNELS = ("attend_selected", "latent_attention", "select_keys")
FEW = 4
"""Queries of a sequence, on average, up to which latents are gathered for each of them; a decode step has one."""


class SelectionKernels(Bindings):
    """The bindings, as :mod:`.kernels` describes them. A token's result does not depend on the other tokens."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library)
        self._select = self.function("select_keys", c_int64, *[c_void_p] * 7, c_int, c_int, *[c_int64] * 11)
        self._joined = joining(AttentionKernels(library).paged_attention)
        self._attend = self.function("attend_selected", c_int64, *[c_void_p] * 9, c_int, *[c_int64] * 13, c_float)

    def select_keys(
        self,
        query: Tensor,
        weights: Tensor,
        index_cache: Tensor,
        block_table: Tensor,
        query_start_loc: Tensor,
        kv_lens: Tensor,
        budget: int,
        group: int = 1,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """See :func:`hal.ops.select_keys`. It reads no keys for a token that selects all.

        Raises:
            OperationError: a sequence is outside its block table or the cache, or shapes or dtypes differ.
        """
        check_budget(budget, group)
        (tokens, heads, dim), (sequences, max_blocks) = query.shape, block_table.shape
        fits = weights.shape == (tokens, heads) and weights.dtype in (query.dtype, torch.float32)
        fits = fits and index_cache.dtype is query.dtype and index_cache.is_contiguous() and index_cache.shape[2] == dim
        table, starts = integers(block_table, "block_table"), integers(query_start_loc, "query_start_loc")
        lens = integers(kv_lens, "kv_lens")
        fits = fits and starts.shape == (sequences + 1,) and lens.shape == (sequences,)
        require(fits, "select_keys", query, weights, index_cache, indices=(table, starts, lens))
        query, (_, outer, inner) = rows(query)
        weights = weights.contiguous()
        shape = tokens, budget + group - 1
        selected = torch.empty(shape, dtype=torch.int32) if out is None else out
        wrong = self._select(
            *addresses(query, weights, index_cache, table, starts, lens, selected),
            DTYPES[query.dtype],
            DTYPES[weights.dtype],
            *(sequences, tokens, heads, dim, *index_cache.shape[:2], max_blocks, outer, inner, budget, group),
        )
        if wrong:
            raise OperationError(
                f"select_keys: sequence {wrong - 1} has {int(lens[wrong - 1])} tokens, an index key for each {group}, "
                f"in the blocks {table[wrong - 1].tolist()} of a cache of {index_cache.shape[0]} blocks of "
                f"{index_cache.shape[1]}",
                "check the batch's block_table and lengths",
            )
        return selected

    def attend_selected(
        self,
        query: Tensor,
        query_rope: Tensor,
        latent_cache: Tensor,
        rope_cache: Tensor,
        positions: Tensor,
        block_table: Tensor,
        query_start_loc: Tensor,
        scale: float,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """See :func:`hal.ops.attend_selected`. It gathers each selected row once, for all heads.

        In bfloat16 on a CPU that multiplies pairs, it rounds weights to bfloat16.

        Raises:
            OperationError: a position is outside its sequence's blocks or the cache, or shapes or dtypes differ.
        """
        chosen = integers(positions, "positions")
        require(chosen.dim() == 2 and chosen.shape[0] == query.shape[0], "attend_selected", query, indices=(chosen,))
        caches, places = (latent_cache, rope_cache), (block_table, query_start_loc)
        y, wrong = self._run("attend_selected", query, query_rope, *caches, chosen, *places, None, scale, out)
        if wrong:
            raise OperationError(
                f"attend_selected: token {wrong - 1} selects the positions {chosen[wrong - 1].tolist()!s:.200} of a "
                f"cache of {latent_cache.shape[0]} blocks of {latent_cache.shape[1]}",
                "check the selection and the batch's block_table",
            )
        return y

    def latent_attention(
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
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """See :func:`hal.ops.latent_attention`. Few queries of a sequence read its latents where they are.

        In bfloat16 on a CPU that multiplies pairs, they round weights to bfloat16.

        Raises:
            OperationError: a sequence is outside its block table or the cache, or shapes or dtypes differ.
        """
        caches, places = (latent_cache, rope_cache), (block_table, query_start_loc)
        if query.shape[0] > FEW * block_table.shape[0] or options != AttentionOptions(options.scale):
            on_host = query_start_loc_host, kv_lens_host
            found = self._joined(query, query_rope, *caches, *places, kv_lens, *on_host, options)
            return found if out is None else out.copy_(found)
        lens = integers(kv_lens, "kv_lens")
        y, wrong = self._run("latent_attention", query, query_rope, *caches, None, *places, lens, options.scale, out)
        if wrong:
            raise OperationError(
                f"latent_attention: token {wrong - 1} attends past the blocks of its sequence, with the lengths "
                f"{lens.tolist()!s:.200}, in a cache of {latent_cache.shape[0]} blocks of {latent_cache.shape[1]}",
                "check the batch's block_table and lengths",
            )
        return y

    def _run(
        self,
        name: str,
        query: Tensor,
        query_rope: Tensor,
        latent_cache: Tensor,
        rope_cache: Tensor,
        chosen: Tensor | None,
        block_table: Tensor,
        query_start_loc: Tensor,
        lens: Tensor | None,
        scale: float,
        out: Tensor | None,
    ) -> tuple[Tensor, int]:
        """Attend at chosen positions, or at all up to each token's own. Also returns 1 + a token outside, or 0."""
        (tokens, heads, rank), (sequences, max_blocks) = query.shape, block_table.shape
        rope_dim, caches = query_rope.shape[2], (latent_cache, rope_cache)
        fits = query_rope.shape[:2] == query.shape[:2] and query_rope.dtype is query.dtype
        fits = fits and all(each.is_contiguous() and each.dtype is query.dtype for each in caches)
        fits = fits and latent_cache.shape[2] == rank and rope_cache.shape == (*latent_cache.shape[:2], rope_dim)
        table, starts = integers(block_table, "block_table"), integers(query_start_loc, "query_start_loc")
        fits = fits and starts.shape == (sequences + 1,) and (lens is None or lens.shape == (sequences,))
        require(fits, name, query, query_rope, *caches, indices=(table, starts))
        query, (_, *strides) = rows(query)
        query_rope, (_, *rope_strides) = rows(query_rope)
        y = empty(query.shape, query) if out is None else out
        at = None if chosen is None else chosen.data_ptr(), *addresses(table, starts)
        wrong = self._attend(
            *addresses(query, query_rope, *caches),
            *at,
            None if lens is None else lens.data_ptr(),
            y.data_ptr(),
            DTYPES[query.dtype],
            *(sequences, tokens, heads, rank, rope_dim, *latent_cache.shape[:2], max_blocks),
            0 if chosen is None else chosen.shape[1],
            *strides,
            *rope_strides,
            scale,
        )
        return y, int(wrong)
