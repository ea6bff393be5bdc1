"""Attention in a graph, with lengths that change between replays, for tests of devices' graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import hal
from hal import ops

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

    def __init__(self, backend: hal.Backend, *, block_size: int, head_dim: int, window: int | None = None) -> None:
        self.backend, self.window = backend, window
        device, generator = backend.device.torch, torch.Generator().manual_seed(0)
        blocks_each = LONGEST // block_size
        cache = (ROWS * blocks_each, block_size, KV_HEADS, head_dim)
        self.query, *self.caches = (
            torch.randn(shape, generator=generator).half().to(device)
            for shape in ((ROWS, HEADS, head_dim), cache, cache)
        )
        table = torch.randperm(ROWS * blocks_each, generator=generator).to(torch.int32)
        self.table = table.view(ROWS, blocks_each).to(device)
        self.starts, self.lens = torch.arange(ROWS + 1, dtype=torch.int32), torch.ones(ROWS, dtype=torch.int32)
        self.device_starts, self.device_lens = self.starts.to(device), self.lens.to(device)

    def call(self, query: Tensor, lens: Tensor, attention: Any = ops.paged_attention) -> Tensor:
        attended: Tensor = attention(
            query, *self.caches, self.table, self.device_starts, self.device_lens, self.starts, lens, SCALE, True,
            self.window,
        )  # fmt: skip
        return attended

    def twice(self, lens: Tensor | None = None, attention: Any = ops.paged_attention) -> Tensor:
        """Call attention twice; the second call's query is the first one's result."""
        lens = self.lens if lens is None else lens
        first = self.call(self.query, lens, attention)
        return self.call(first * 4 + self.query, lens, attention)

    def host_values(self, lens: Sequence[int]) -> dict[str, Any]:
        return {"kv_lens_host": torch.tensor(lens, dtype=torch.int32), "query_start_loc_host": self.starts}
