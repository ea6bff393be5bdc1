"""Random steps over paged caches."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor


class Step:
    """A random step of sequences, some of whose tokens are cached; unwritten slots are NaN."""

    def __init__(
        self,
        seed: int,
        group: int = 1,
        queries: Sequence[int] = (0, 1, 1, 3, 9),
        cached: Sequence[int] = (0, 0, 5, 60, 1100),
        sequences: Sequence[int] = (1, 3),
    ) -> None:
        print(f"seed {seed}")  # noqa: T201 - pytest prints it with a failure
        self.random, self.draw, self.group = random.Random(seed), torch.Generator().manual_seed(seed), group
        choose = self.random.choice
        self.new = [choose(queries) for _ in range(choose(sequences))]
        self.lens = [new and new + choose(cached) for new in self.new]
        self.block_size, self.tokens = choose((3, 16)), sum(self.new)
        self.padding = choose((0, 2))
        blocks = [-(-length // self.block_size) for length in self.lens]
        places = torch.randperm(sum(blocks) + 1, generator=self.draw).int()
        self.num_blocks = len(places)
        self.table = torch.full((len(blocks), max(blocks) + 1), int(places[-1]), dtype=torch.int32)
        for row, count, end in zip(self.table, blocks, torch.tensor(blocks).cumsum(0).tolist(), strict=True):
            row[:count] = places[end - count : end]
        self.starts = torch.tensor([0, *self.new]).cumsum(0).int()
        self.kv_lens = torch.tensor(self.lens, dtype=torch.int32)
        self.places = [
            (sequence, length - new + at)
            for sequence, (new, length) in enumerate(zip(self.new, self.lens, strict=True))
            for at in range(new)
        ]

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.draw)

    def cache(self, *width: int, rows: int = 1) -> tuple[Tensor, list[Tensor]]:
        """Return a paged cache and its rows by sequence, one for each so many tokens."""
        cache, held = torch.full((self.num_blocks, self.block_size, *width), float("nan")), []
        for blocks, length in zip(self.table.long(), self.lens, strict=True):
            found = self.normal(length // rows, *width)
            at = torch.arange(length // rows)
            cache[blocks[at // self.block_size], at % self.block_size] = found
            held.append(found.double())
        return cache, held
