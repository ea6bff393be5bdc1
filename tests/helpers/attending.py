"""Inputs of attention: in a graph, with lengths that change between replays, and with queries that attend to no key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import hal
from hal import ops
from hal.ops import Draw, Sample

ROWS, HEADS, KV_HEADS, SCALE = 5, 4, 2, 0.2
LENGTHS = [
    [1, 1, 1, 1, 1],
    [5, 130, 384, 2, 77],
    [6, 131, 129, 3, 78],
    [384, 2, 77, 5, 130],
    [9, 0, 300, 0, 0],
    [0] * 5,
]
"""Growing, shrinking, permuted and padded lengths; consecutive ones differ."""
LONGEST = max(map(max, LENGTHS))


class Attend:
    """Two attentions on a random cache, and the arguments of a graph of them."""

    def __init__(
        self,
        backend: hal.Backend,
        *,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype = torch.float16,
        with_sinks: bool = False,
        **options: Any,
    ) -> None:
        self.backend, self.options = backend, ops.AttentionOptions(SCALE, **options)
        device, generator = backend.device.torch, torch.Generator().manual_seed(0)
        blocks_each = LONGEST // block_size
        cache = (ROWS * blocks_each, block_size, KV_HEADS, head_dim)
        self.query, *self.caches = (
            torch.randn(shape, generator=generator).to(dtype).to(device)
            for shape in ((ROWS, HEADS, head_dim), cache, cache)
        )
        self.sinks = torch.randn(HEADS, generator=generator).to(dtype).to(device) if with_sinks else None
        table = torch.randperm(ROWS * blocks_each, generator=generator).to(torch.int32)
        self.table = table.view(ROWS, blocks_each).to(device)
        self.starts, self.lens = torch.arange(ROWS + 1, dtype=torch.int32), torch.ones(ROWS, dtype=torch.int32)
        self.device_starts, self.device_lens = self.starts.to(device), self.lens.to(device)

    def call(self, query: Tensor, lens: Tensor, attention: Any = ops.paged_attention) -> Tensor:
        attended: Tensor = attention(
            query,
            *self.caches,
            self.table,
            self.device_starts,
            self.device_lens,
            self.starts,
            lens,
            self.sinks,
            self.options,
        )
        return attended

    def twice(self, lens: Tensor | None = None, attention: Any = ops.paged_attention) -> Tensor:
        """Call attention twice; the second call's query is the first one's result."""
        lens = self.lens if lens is None else lens
        first = self.call(self.query, lens, attention)
        return self.call(first * 4 + self.query, lens, attention)

    def host_values(self, lens: Sequence[int]) -> dict[str, Any]:
        return {"kv_lens_host": torch.tensor(lens, dtype=torch.int32), "query_start_loc_host": self.starts}


def paged_sample(
    draw: Draw,
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    heads: tuple[int, int] = (2, 1),
    head_dim: int = 64,
    block_size: int = 8,
    sinks: bool = False,
    padding: int = 0,
    spare: int = 1,
    integers: torch.dtype = torch.int32,
    **options: Any,
) -> Sample:
    """Draw paged_attention: shuffled blocks, NaN in unwritten slots, and a query that is a view of a packed projection.

    ``padding`` tokens follow the last sequence's; ``spare`` columns of the table are more than any sequence needs.
    """
    num_heads, kv_heads = heads
    columns = -(-max(kv_lens) // block_size) + spare
    table = draw.permutation(len(kv_lens) * columns + 2)[: len(kv_lens) * columns].view(len(kv_lens), columns)
    caches = [draw.normal(len(kv_lens) * columns + 2, block_size, kv_heads, head_dim) for _ in range(2)]
    free = torch.ones(len(kv_lens) * columns + 2, block_size, dtype=torch.bool)
    for row, length in zip(table.long(), kv_lens, strict=True):
        places = torch.arange(length)
        free[row[places // block_size], places % block_size] = False
    for cache in caches:
        cache[free] = torch.nan
    starts, lens = torch.tensor([0, *query_lens]).cumsum(0).to(integers), torch.tensor(kv_lens, dtype=integers)
    packed = draw.normal(sum(query_lens) + padding, num_heads + 2 * kv_heads, head_dim)
    return (
        packed[:, :num_heads],
        *caches,
        table.to(integers),
        *(starts, lens) * 2,
        draw.normal(num_heads) if sinks else None,
        ops.AttentionOptions(head_dim**-0.5, **options),
    )


def with_blind_queries(draw: Draw) -> Iterator[Sample]:
    """Yield samples of ``scaled_dot_product_attention`` in which some queries attend to no key."""
    for batch, heads, kv_heads, queries, keys, causal, masked in (
        (2, 8, 2, 1, 9, False, True),
        (2, 4, 4, 70, 70, False, True),
        (1, 4, 2, 40, 33, True, False),
        (2, 4, 2, 17, 33, True, True),
        (1, 8, 8, 200, 130, True, True),
    ):
        tensors = draw.normal(batch, heads, queries, 64), *(draw.normal(batch, kv_heads, keys, 64) for _ in range(2))
        mask = draw.integers(0, 2, batch, 1, queries, keys).bool()
        mask[0, :, : queries // 2 + 1] = False
        yield *tensors, mask if masked else None, 0.125, causal
