"""A paged cache and attention over it, on a backend in its cache layout and on the CPU as reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from hal import ops
from hal.drivers.backend import Backend
from hal.ops.declaration.samples import Draw
from hal.ops.tolerance import assert_agree
from hal.step.state import StateSpec, canonical_states

ATTENTION = "paged_attention"


@attrs.frozen
class Paged:
    """Sequences in a backend's cache, written by its ``store_kv_cache``, and in a canonical cache on the CPU.

    In the canonical layout, slots without a token hold NaN.
    """

    backend: Backend
    dtype: torch.dtype
    heads: int
    head_dim: int
    caches: tuple[Tensor, Tensor]
    reference: tuple[Tensor, Tensor]
    table: Tensor

    @classmethod
    def filled(
        cls,
        backend: Backend,
        dtype: torch.dtype,
        block_size: int,
        head_dim: int,
        lengths: Sequence[int],
        *,
        heads: int = 4,
        kv_heads: int = 2,
        seed: int = 0,
    ) -> Paged:
        """Create a cache with sequences of these lengths in scattered blocks."""
        needed = [math.ceil(length / block_size) for length in lengths]
        spec = StateSpec.key_value(1, kv_heads, head_dim, dtype, sum(needed) + 2, block_size)
        draw = Draw(dtype, seed=seed)
        free = (1 + draw.permutation(sum(needed))).tolist()
        table = torch.zeros(len(lengths), max(needed), dtype=torch.int32)
        slots: list[int] = []
        for row, (count, length) in enumerate(zip(needed, lengths, strict=True)):
            owned = [free.pop() for _ in range(count)]
            table[row, :count] = torch.tensor(owned, dtype=torch.int32)
            slots += [owned[at // block_size] * block_size + at % block_size for at in range(length)]
        keys, values = (draw.normal(sum(lengths), kv_heads, head_dim) for _ in range(2))
        where = torch.tensor(slots, dtype=torch.int32)
        with torch.inference_mode():
            caches, reference = (
                (each.layers[0]["key"], each.layers[0]["value"])
                for each in (backend.allocate(spec), canonical_states(spec, torch.device("cpu")))
            )
            for cache in (*reference, *(caches if backend.state_layout == "canonical" else ())):
                cache.fill_(math.nan)
            device = backend.device.torch
            ops.store_kv_cache(keys.to(device), values.to(device), *caches, where.to(device))
            ops.operation("store_kv_cache").reference(keys, values, *reference, where)
        return cls(backend, dtype, heads, head_dim, caches, reference, table.to(device))

    def check(
        self, query_lens: Sequence[int], kv_lens: Sequence[int], *, causal: bool = True, window: int | None = None
    ) -> None:
        """Attend with the last ``query_lens`` tokens of each sequence.

        Raises:
            AssertionError: the result differs from the reference's.
        """
        device, operation = self.backend.device.torch, ops.operation(ATTENTION)
        query = Draw(self.dtype, seed=sum(kv_lens)).normal(sum(query_lens), self.heads, self.head_dim)
        starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
        lens = torch.tensor(kv_lens, dtype=torch.int32)
        options = ops.AttentionOptions(self.head_dim**-0.5, window=window, causal=causal)
        rest: tuple[Any, ...] = starts, lens, None, options
        with torch.inference_mode():
            found = ops.paged_attention(
                query.to(device), *self.caches, self.table, starts.to(device), lens.to(device), *rest
            )
            self.backend.device.synchronize()
            expected = operation.reference(query, *self.reference, self.table.cpu(), starts, lens, *rest)
        assert_agree(operation, self.dtype, found, expected, f"queries {list(query_lens)} of {list(kv_lens)}")
