"""Which rows of consecutive experts' rows a program computes.

A program finds its expert from the counts on the device, and the grid is an upper bound that depends only on shapes,
so that a captured launch serves all counts.
"""

import triton
import triton.language as tl


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
