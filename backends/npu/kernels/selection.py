"""Sparse attention: npu_lightning_indexer and npu_sparse_flash_attention where they apply, else the references.

Lengths stay on the device, so graphs need no updates. Both operators run in the layout TND, and their documents leave
open what rows of no sequence hold. So a further sequence without keys takes the rows past the last one.

Sources: torch_npu's documentation of ``npu_lightning_indexer`` and ``npu_sparse_flash_attention``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch_npu
from torch import Tensor
from torch.nn import functional

from hal.ops.declaration.operation import operation
from hal.ops.kernels.kernel_table import Kernel
from hal.vendor import PreparingKernel

from ..soc import Generation
from .latent_attention import MOST_HEADS, RANK, ROPE_DIM, blocks_taken, lacking
from .recurrence import Constants

INDEX_DIM, MOST_INDEX_HEADS = 128, 64
"""The only size of an index key, and the most heads of an index query."""
LARGEST_BUDGETS = (2048, *range(3072, 8193, 1024))
"""The largest budget up to which all are supported, and further ones."""
_NONE = torch.iinfo(torch.int32).max


def _ends(query_start_loc: Tensor, query: Tensor) -> Tensor:
    """Return the ends of the sequences' queries, with that of the further sequence, and the given tensor."""
    # Counted on the device: a trace would keep the number of its example as a constant.
    tokens = torch.ones_like(query[:, 0, 0], dtype=torch.int32).sum(0, keepdim=True, dtype=torch.int32)
    ends = torch.cat((query_start_loc[1:], tokens))
    return torch.stack((torch.minimum(ends, tokens), query_start_loc))


def _with_row(block_table: Tensor) -> Tensor:
    return functional.pad(block_table, (0, 0, 0, 1))


def _with_length(kv_lens: Tensor) -> Tensor:
    return functional.pad(kv_lens, (0, 1))


def _rows(slot_mapping: Tensor) -> Tensor:
    return slot_mapping.long().unsqueeze(1)


def store_index_cache(key: Tensor, index_cache: Tensor, slot_mapping: Tensor) -> None:
    """See :func:`hal.ops.store_index_cache`. Slots are int64, in rows of one."""
    torch_npu.npu_scatter_nd_update_(index_cache.view(-1, index_cache.shape[-1]), slot_mapping, key)


class SparseAttention:
    """The kernels of selections. Their lengths and block tables have a further sequence; see :func:`_ends`.

    Args:
        device: the NPU.
        generation: its generation.
    """

    def __init__(self, device: torch.device, generation: Generation) -> None:
        self._constants, self._generation = Constants(device), generation

    @property
    def kernels(self) -> Mapping[str, Kernel]:
        """The kernels by operation; those of sparse attention only on generations that have it."""
        storing: dict[str, Kernel] = {"store_index_cache": PreparingKernel(store_index_cache, {"slot_mapping": _rows})}
        if not self._generation.index_heads:
            return storing
        whole: dict[str, Callable[..., Tensor]] = {"query_start_loc": _ends, "block_table": _with_row}
        selecting = {**whole, "kv_lens": _with_length}
        return storing | {
            "attend_selected": PreparingKernel(self.attend_selected, whole),
            "select_and_attend": PreparingKernel(self.select_and_attend, selecting),
            "select_keys": PreparingKernel(self.select_keys, selecting),
        }

    @property
    def conditions(self) -> Mapping[str, Callable[..., str | None]]:
        """The function that returns why a selection is not fused with its attention, or None, by operation."""
        return {"select_and_attend": self.unfused} if self._generation.index_heads else {}

    def unfused(
        self,
        index_query: Tensor,
        weights: Tensor,
        index_cache: Tensor,
        query: Tensor,
        query_rope: Tensor,
        latent_cache: Tensor,
        rope_cache: Tensor,
        block_table: Tensor,
        query_start_loc: Tensor,
        kv_lens: Tensor,
        budget: int,
        scale: float,
        group: int = 1,
    ) -> str | None:
        """Return what CANN's operators do not take of a call of ``select_and_attend``; None if they take it."""
        lacks = {
            "npu_lightning_indexer": self._selection_lacks(index_query, weights, index_cache, budget, group),
            "npu_sparse_flash_attention": self._attention_lacks(query, query_rope, latent_cache),
        }
        return "; ".join(f"{name} does not take {', '.join(each)}" for name, each in lacks.items() if each) or None

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
    ) -> Tensor:
        """See :func:`hal.ops.select_keys`. CANN's positions are in the order of their scores, so they are sorted."""
        if not self._selects(query, weights, index_cache, kv_lens, budget, group):
            selected: Tensor = operation("select_keys").reference(
                query, weights, index_cache, block_table[:-1], query_start_loc[1], kv_lens[:-1], budget, group
            )
            return selected
        found = self._indexed(query, weights, index_cache, block_table, query_start_loc[0], kv_lens, budget).squeeze(1)
        ascending = torch.where(found < 0, _NONE, found).sort(-1).values
        return torch.where(ascending == _NONE, -1, ascending)

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
    ) -> Tensor:
        """See :func:`hal.ops.attend_selected`."""
        if not self._attends(query, query_rope, latent_cache):
            attended: Tensor = operation("attend_selected").reference(
                query, query_rope, latent_cache, rope_cache, positions, block_table[:-1], query_start_loc[1], scale
            )
            return attended
        sequences, most = block_table.shape[0], block_table.shape[1] * latent_cache.shape[1]
        lengths = self._constants.full(sequences, most, torch.int32)
        return self._attended(
            query,
            query_rope,
            latent_cache,
            rope_cache,
            positions.unsqueeze(1),
            block_table,
            query_start_loc[0],
            lengths,
            scale,
        )

    def select_and_attend(
        self,
        index_query: Tensor,
        weights: Tensor,
        index_cache: Tensor,
        query: Tensor,
        query_rope: Tensor,
        latent_cache: Tensor,
        rope_cache: Tensor,
        block_table: Tensor,
        query_start_loc: Tensor,
        kv_lens: Tensor,
        budget: int,
        scale: float,
        group: int = 1,
    ) -> Tensor:
        """See :func:`hal.ops.select_and_attend`. Two launches, without the sort of :meth:`select_keys`."""
        of_sequences = block_table, query_start_loc[0], kv_lens
        latents = query, query_rope, latent_cache, rope_cache
        selects = self._selects(index_query, weights, index_cache, kv_lens, budget, group)
        if not selects or not self._attends(query, query_rope, latent_cache):
            selected = self.select_keys(
                index_query, weights, index_cache, block_table, query_start_loc, kv_lens, budget, group
            )
            return self.attend_selected(*latents, selected, block_table, query_start_loc, scale)
        chosen = self._indexed(index_query, weights, index_cache, *of_sequences, budget)
        return self._attended(*latents, chosen, *of_sequences, scale)

    def _selects(
        self, query: Tensor, weights: Tensor, index_cache: Tensor, kv_lens: Tensor, budget: int, group: int
    ) -> bool:
        called = query.shape[0] >= kv_lens.shape[0] - 1 > 0
        return called and not self._selection_lacks(query, weights, index_cache, budget, group)

    def _attends(self, query: Tensor, query_rope: Tensor, latent_cache: Tensor) -> bool:
        return query.shape[0] > 0 and not self._attention_lacks(query, query_rope, latent_cache)

    def _selection_lacks(
        self, query: Tensor, weights: Tensor, index_cache: Tensor, budget: int, group: int
    ) -> tuple[str, ...]:
        """Return what npu_lightning_indexer does not support of a call of ``select_keys``."""
        most, *further = LARGEST_BUDGETS
        _, heads, width = query.shape
        return lacking(
            (width == INDEX_DIM, "index keys of {} elements", width),
            (heads in self._generation.index_heads, "{} index heads", heads),
            (query.dtype is not torch.float32, "queries in {}", query.dtype),
            (weights.dtype is query.dtype or self._generation.wide_index_weights, "weights in {}", weights.dtype),
            blocks_taken(index_cache),
            (group == 1, "groups of {} tokens", group),
            (0 < budget <= most or budget in further, "the budget {}", budget),
        )

    def _attention_lacks(self, query: Tensor, query_rope: Tensor, latent_cache: Tensor) -> tuple[str, ...]:
        """Return what npu_sparse_flash_attention does not support of a call of ``attend_selected``."""
        _, heads, rank = query.shape
        power = heads & (heads - 1) == 0 or self._generation.any_sparse_heads
        return lacking(
            (rank == RANK, "latents of {} elements", rank),
            (query_rope.shape[2] == ROPE_DIM, "rotary rows of {} elements", query_rope.shape[2]),
            (heads <= MOST_HEADS and power, "{} heads", heads),
            (query.dtype is not torch.float32, "queries in {}", query.dtype),
            blocks_taken(latent_cache),
        )

    def _indexed(
        self,
        query: Tensor,
        weights: Tensor,
        index_cache: Tensor,
        block_table: Tensor,
        ends: Tensor,
        kv_lens: Tensor,
        budget: int,
    ) -> Tensor:
        """Return the positions that each token selects, ``[tokens, 1, budget]``, in the order of scores, then -1."""
        return torch_npu.npu_lightning_indexer(  # type: ignore[no-any-return]
            query.contiguous(),
            index_cache.unsqueeze(2),
            weights.contiguous(),
            actual_seq_lengths_query=ends,
            actual_seq_lengths_key=kv_lens,
            block_table=block_table,
            layout_query="TND",
            layout_key="PA_BSND",
            sparse_count=budget,
            sparse_mode=3,
        )[0]

    def _attended(
        self,
        query: Tensor,
        query_rope: Tensor,
        latent_cache: Tensor,
        rope_cache: Tensor,
        chosen: Tensor,
        block_table: Tensor,
        ends: Tensor,
        kv_lens: Tensor,
        scale: float,
    ) -> Tensor:
        latents = latent_cache.unsqueeze(2)
        return torch_npu.npu_sparse_flash_attention(  # type: ignore[no-any-return]
            query.contiguous(),
            latents,
            latents,
            chosen.contiguous(),
            scale,
            block_table=block_table,
            actual_seq_lengths_query=ends,
            actual_seq_lengths_kv=kv_lens,
            query_rope=query_rope.contiguous(),
            key_rope=rope_cache.unsqueeze(2),
            layout_query="TND",
            layout_kv="PA_BSND",
            sparse_mode=0,
            attention_mode=2,
        )[0]
