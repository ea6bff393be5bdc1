"""Python bindings of the C++ kernels of latent attention with its projections."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p

from torch import Tensor

from hal.errors import OperationError
from hal.ops import AttentionOptions

from .arguments import DTYPES, Bindings, addresses, empty, integers, require, rows
from .selection_kernels import SelectionKernels

LATENT_KERNELS = ("head_linear", "multi_head_latent_attention")


class LatentKernels(Bindings):
    """The bindings, as :mod:`.kernels` describes them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library)
        self._heads = self.function("multiply_heads", None, *[c_void_p] * 3, c_int, *[c_int64] * 7, c_int)
        self._attend = self.function(
            "multi_head_latent_attention", c_int64, *[c_void_p] * 10, c_int, *[c_int64] * 16, c_float
        )
        self._absorbed = SelectionKernels(library).latent_attention

    def head_linear(self, x: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
        """See :func:`hal.ops.head_linear`. It reads heads and weights in place, and the weights of few rows once."""
        (tokens, heads, width), outputs = x.shape, weight.shape[2]
        require(weight.shape[:2] == (heads, width) and weight.dtype is x.dtype, "head_linear", x, weight)
        x, (_, outer, inner) = rows(x)
        transposed = weight.stride(1) == 1 and weight.stride(2) == width
        if not transposed and weight.stride()[1:] != (outputs, 1):
            weight = weight.contiguous()
        y = empty((tokens, heads, outputs), x) if out is None else out
        sizes = tokens, heads, width, outputs, outer, inner, weight.stride(0)
        self._heads(*addresses(x, weight, y), DTYPES[x.dtype], *sizes, transposed)
        return y

    def multi_head_latent_attention(
        self,
        query: Tensor,
        query_rope: Tensor,
        latent_cache: Tensor,
        rope_cache: Tensor,
        key_weight: Tensor,
        value_weight: Tensor,
        block_table: Tensor,
        query_start_loc: Tensor,
        kv_lens: Tensor,
        query_start_loc_host: Tensor,
        kv_lens_host: Tensor,
        options: AttentionOptions,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """See :func:`hal.ops.multi_head_latent_attention`. Each sequence takes the form with fewer products.

        In bfloat16 on a CPU that multiplies pairs, it rounds weights to bfloat16. Windows, softcaps and attention that
        is not causal are composed of the absorbed form's kernels.

        Raises:
            OperationError: a sequence is outside its block table or the cache, or shapes or dtypes differ.
        """
        caches, lengths = (latent_cache, rope_cache), (query_start_loc_host, kv_lens_host)
        if options != AttentionOptions(options.scale):
            places = block_table, query_start_loc, kv_lens, *lengths
            attended = self._absorbed(self.head_linear(query, key_weight), query_rope, *caches, *places, options)
            return self.head_linear(attended, value_weight.transpose(1, 2), out=out)
        (tokens, heads, nope), (sequences, max_blocks) = query.shape, block_table.shape
        (num_blocks, block_size, rank), value = latent_cache.shape, value_weight.shape[1]
        rope, weights = query_rope.shape[2], (key_weight, value_weight)
        fits = all(each.dtype is query.dtype for each in (query_rope, *caches, *weights))
        fits = fits and query_rope.shape[:2] == query.shape[:2] and rope_cache.shape == (num_blocks, block_size, rope)
        fits = fits and all(each.is_contiguous() for each in caches)
        fits = fits and key_weight.shape == (heads, nope, rank) and value_weight.shape == (heads, value, rank)
        table, starts = integers(block_table, "block_table"), integers(lengths[0], "query_start_loc_host")
        lens = integers(lengths[1], "kv_lens_host")
        fits = fits and starts.shape == (sequences + 1,) and lens.shape == (sequences,)
        name = "multi_head_latent_attention"
        require(fits, name, query, query_rope, *caches, *weights, indices=(table, starts, lens))
        query, (_, *strides) = rows(query)
        query_rope, (_, *rope_strides) = rows(query_rope)
        keys, values = (each if each.stride()[1:] == (rank, 1) else each.contiguous() for each in weights)
        y = empty((tokens, heads, value), query) if out is None else out
        wrong = self._attend(
            *addresses(query, query_rope, *caches, keys, values, table, starts, lens, y),
            DTYPES[query.dtype],
            *(sequences, tokens, heads, nope, rope, rank, value, num_blocks, block_size, max_blocks),
            *strides,
            *rope_strides,
            keys.stride(0),
            values.stride(0),
            options.scale,
        )
        if wrong:
            raise OperationError(
                f"{name}: sequence {wrong - 1} has {int(lens[wrong - 1])} tokens in the blocks "
                f"{table[wrong - 1].tolist()} of a cache of {num_blocks} blocks of {block_size}",
                "check the batch's block_table and lengths",
            )
        return y
