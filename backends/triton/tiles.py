"""Blocks of consecutive rows that do not cross sequences or experts, found on the device.

The grid is an upper bound that depends only on shapes, so that a captured launch serves all lengths and counts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .interpreter import bound


@triton.jit
def rows_of_tile(counts, tile, num_experts: tl.constexpr, rows: tl.constexpr):
    """Return the expert of a tile of ``rows`` rows, the tile's first row, and the end of the expert's rows.

    Tiles past the last have the expert ``num_experts``.
    """
    most: tl.constexpr = triton.next_power_of_2(num_experts)
    index = tl.arange(0, most)
    counted = tl.load(counts + index, mask=index < num_experts, other=0).to(tl.int32)
    tiles = (counted + rows - 1) // rows
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    begin = tl.sum(tl.where(index < expert, counted, 0), 0)
    first = begin + (tile - tl.sum(tl.where(index < expert, tiles, 0), 0)) * rows
    return expert, first, begin + tl.sum(tl.where(index == expert, counted, 0), 0)


def most_tiles(count: int, num_experts: int, rows: int) -> int:
    """Return the maximum number of tiles of ``rows`` rows, for any counts with sum ``count``."""
    # Each expert with rows leaves at most rows - 1 of its last tile empty, and no tile is empty.
    return min(count, (count + (rows - 1) * min(count, num_experts)) // rows)


@triton.jit
def owner(block, query_start_loc, sequences, size: tl.constexpr):
    """Return the sequence of a block of ``size`` tokens: ``sequences`` for padding tokens.

    A sequence whose first token is ``start`` begins at block ``start // size + its index``. For all lengths, this
    leaves room for its blocks, of which the last may be partial, within ``tokens // size + sequences + 1``.
    """
    found = 0
    for first in range(1, bound(sequences + 1), 128):
        index = first + tl.arange(0, 128)
        start = tl.load(query_start_loc + index, mask=index <= sequences, other=0).to(tl.int32)
        if size > 1:
            start = start // size + index
        found += tl.sum(((start <= block) & (index <= sequences)).to(tl.int32), 0)
    return found
