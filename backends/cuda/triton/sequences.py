"""Blocks of tokens that do not cross sequences, found on the device from ``query_start_loc``."""

import triton
import triton.language as tl

from .interpreter import bound


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
