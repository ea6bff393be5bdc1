"""Limits of a GPU by its compute capability."""

from __future__ import annotations

import torch

from hal.device.limits import Limits

OLDEST = (7, 5)
"""The compute capability of the Turing generation, the oldest that torch's builds for CUDA 13 support."""
CAPTURE_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
BLOCK_SIZES_OF_PAGES = (256, 512, 128, 64, 32, 16)
"""Block sizes for torch's attention, which reads blocks of 256 tokens in place and gathers others."""


def limits(capability: tuple[int, int], *, pages: bool) -> Limits:
    """Return the limits of a GPU.

    Args:
        capability: the compute capability, major and minor.
        pages: whether attention prefers blocks that flash attention reads in place.
    """
    halves = (torch.bfloat16, torch.float16) if capability >= (8, 0) else (torch.float16,)
    return Limits(
        dtypes=(*halves, torch.float32), block_sizes=BLOCK_SIZES_OF_PAGES if pages else (), capture_sizes=CAPTURE_SIZES
    )
