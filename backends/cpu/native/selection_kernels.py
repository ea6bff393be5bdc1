"""Python bindings of the C++ kernels of latent and of sparse attention."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from hal.errors import OperationError
from hal.ops import AttentionOptions
from hal.ops.block_selection import check_blocks, check_choices
from hal.ops.compressed_attention import check_window
from hal.ops.kernels.composed_attention import joining
from hal.ops.selection import check_budget

from .arguments import DTYPES, Bindings, addresses, empty, integers, require, rows
from .attention_kernels import AttentionKernels

SELECTION_KERNELS = (
    "attend_chosen",
    "attend_compressed",
    "attend_selected",
    "latent_attention",
    "select_blocks",
    "select_keys",
)
FEW = 4
"""The default of ``few``. A decode step has one query."""


class SelectionKernels(Bindings):
    """The bindings, as :mod:`.kernels` describes them.

    A token's result does not depend on the other tokens, except that of latent attention.

    Args:
        library: the C++ kernels.
        few: queries of a sequence, on average, up to which latents are gathered for each of them.
    """

    def __init__(self, library: ctypes.CDLL, few: int = FEW) -> None:
        super().__init__(library)
        self._few = few
        self._select = self.function("select_keys", c_int64, *[c_void_p] * 7, c_int, c_int, *[c_int64] * 11)
        self._blocks = self.function("select_blocks", c_int64, *[c_void_p] * 6, c_int, *[c_int64] * 12)
        self._chosen = self.function("attend_chosen", c_int64, *[c_void_p] * 7, c_int, *[c_int64] * 12, c_float)
        self._compressed = self.function("attend_compressed", c_int64, *[c_void_p] * 9, c_int, *[c_int64] * 12, c_float)
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
        _check("select_keys", wrong, lens, table, index_cache, group)
        return selected

    def select_blocks(
        self,
        query: Tensor,
        index_cache: Tensor,
        block_table: Tensor,
        query_start_loc: Tensor,
        kv_lens: Tensor,
        top: int,
        group: int,
        local: int,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """See :func:`hal.ops.select_blocks`. It reads no keys for a token that selects all.

        Raises:
            OperationError: a sequence is outside its block table or the cache, or shapes, dtypes or numbers are wrong.
        """
        check_blocks(top, group, local)
        (tokens, heads, dim), (sequences, max_blocks) = query.shape, block_table.shape
        fits = index_cache.dtype is query.dtype and index_cache.is_contiguous() and index_cache.shape[2] == dim
        table, starts = integers(block_table, "block_table"), integers(query_start_loc, "query_start_loc")
        lens = integers(kv_lens, "kv_lens")
        fits = fits and starts.shape == (sequences + 1,) and lens.shape == (sequences,)
        require(fits, "select_blocks", query, index_cache, indices=(table, starts, lens))
        query, (_, outer, inner) = rows(query)
        selected = torch.empty(tokens, heads, top * group, dtype=torch.int32) if out is None else out
        wrong = self._blocks(
            *addresses(query, index_cache, table, starts, lens, selected),
            DTYPES[query.dtype],
            *(sequences, tokens, heads, dim, *index_cache.shape[:2], max_blocks, outer, inner, top, group, local),
        )
        _check("select_blocks", wrong, lens, table, index_cache, 1)
        return selected

    def attend_chosen(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        positions: Tensor,
        block_table: Tensor,
        query_start_loc: Tensor,
        scale: float,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """See :func:`hal.ops.attend_chosen`. It rounds weights as :meth:`attend_selected` does.

        Raises:
            OperationError: a position is outside its sequence's blocks or the cache, or shapes or dtypes differ.
        """
        (tokens, heads, dim), (sequences, max_blocks) = query.shape, block_table.shape
        caches, kv_heads = (key_cache, value_cache), key_cache.shape[2]
        chosen, table = integers(positions, "positions"), integers(block_table, "block_table")
        starts = integers(query_start_loc, "query_start_loc")
        fits = all(each.is_contiguous() and each.dtype is query.dtype for each in caches)
        fits = fits and key_cache.shape == value_cache.shape and key_cache.shape[3] == dim
        fits = fits and chosen.dim() == 3 and chosen.shape[0] == tokens and starts.shape == (sequences + 1,)
        require(fits, "attend_chosen", query, *caches, indices=(chosen, table, starts))
        check_choices(chosen.shape[1], kv_heads, heads)
        query, (_, outer, inner) = rows(query)
        y = empty(query.shape, query) if out is None else out
        wrong = self._chosen(
            *addresses(query, *caches, chosen, table, starts, y),
            DTYPES[query.dtype],
            *(sequences, tokens, heads, kv_heads, dim, *key_cache.shape[:2], max_blocks, *chosen.shape[1:]),
            *(outer, inner, scale),
        )
        _check_positions("attend_chosen", wrong, chosen, key_cache)
        return y

    def attend_compressed(
        self,
        query: Tensor,
        latent_cache: Tensor,
        entry_cache: Tensor,
        entries: Tensor | None,
        sinks: Tensor,
        block_table: Tensor,
        query_start_loc: Tensor,
        kv_lens: Tensor,
        group: int,
        window: int,
        scale: float,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """See :func:`hal.ops.attend_compressed`. It gathers each row once, and rounds weights as the others do.

        Raises:
            OperationError: a token attends outside its sequence's blocks or the caches, or shapes or dtypes differ.
        """
        check_window(window, group, latent_cache, entry_cache)
        (tokens, heads, dim), (sequences, max_blocks) = query.shape, block_table.shape
        caches, chosen = (latent_cache, entry_cache), None if entries is None else integers(entries, "entries")
        table, starts = integers(block_table, "block_table"), integers(query_start_loc, "query_start_loc")
        lens, sinks = integers(kv_lens, "kv_lens"), sinks.contiguous()
        fits = all(each.is_contiguous() and each.dtype is query.dtype and each.shape[2] == dim for each in caches)
        fits = fits and latent_cache.shape[0] == entry_cache.shape[0] and sinks.shape == (heads,)
        fits = fits and sinks.dtype is query.dtype and (chosen is None or chosen.shape[:-1] == (tokens,))
        fits = fits and starts.shape == (sequences + 1,) and lens.shape == (sequences,)
        indices = table, starts, lens, *(() if chosen is None else (chosen,))
        require(fits, "attend_compressed", query, *caches, sinks, indices=indices)
        query, (_, outer, inner) = rows(query)
        y = empty(query.shape, query) if out is None else out
        wrong = self._compressed(
            *addresses(query, *caches, chosen, sinks, table, starts, lens, y),
            DTYPES[query.dtype],
            *(sequences, tokens, heads, dim, *latent_cache.shape[:2], max_blocks),
            *(0 if chosen is None else chosen.shape[1], group, window, outer, inner, scale),
        )
        _check_positions("attend_compressed", wrong, chosen, latent_cache)
        return y

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
        _check_positions("attend_selected", wrong, chosen, latent_cache)
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
        if query.shape[0] > self._few * block_table.shape[0] or options != AttentionOptions(options.scale):
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


def _check(name: str, wrong: int, lens: Tensor, table: Tensor, cache: Tensor, group: int) -> None:
    """Raise OperationError for the sequence that the kernel refused, by its number from 1."""
    if wrong:
        raise OperationError(
            f"{name}: sequence {wrong - 1} has {int(lens[wrong - 1])} tokens, an index key for each {group}, in the "
            f"blocks {table[wrong - 1].tolist()} of a cache of {cache.shape[0]} blocks of {cache.shape[1]}",
            "check the batch's block_table and lengths",
        )


def _check_positions(name: str, wrong: int, chosen: Tensor | None, cache: Tensor) -> None:
    """Raise OperationError for the token that the kernel refused, by its number from 1."""
    if wrong:
        selects = "" if chosen is None else f" selects the positions {chosen[wrong - 1].tolist()!s:.200}, and"
        raise OperationError(
            f"{name}: token {wrong - 1}{selects} attends outside the blocks of its sequence, or a cache of "
            f"{cache.shape[0]} blocks of {cache.shape[1]}",
            "check the selection and the batch's block_table",
        )
