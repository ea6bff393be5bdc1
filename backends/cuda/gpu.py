"""What a GPU can take, by its compute capability."""

from __future__ import annotations

import torch

from hal.device.limits import Limits

OLDEST = (7, 5)
"""The compute capability of the Turing generation: what torch's builds for CUDA 13 begin with."""
CAPTURE_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
BLOCK_SIZES_OF_PAGES = (256, 512, 128, 64, 32, 16)
"""Where torch's attention is used: it reads a cache in place in blocks of 256 tokens, and copies others together."""


def limits(capability: tuple[int, int], *, pages: bool) -> Limits:
    """What a GPU of a compute capability can take.

    Args:
        capability: major and minor.
        pages: whether attention prefers blocks that flash attention reads in place.
    """
    halves = (torch.bfloat16, torch.float16) if capability >= (8, 0) else (torch.float16,)
    return Limits(
        dtypes=(*halves, torch.float32),
        block_sizes=BLOCK_SIZES_OF_PAGES if pages else (),
        capture_sizes=CAPTURE_SIZES,
    )
