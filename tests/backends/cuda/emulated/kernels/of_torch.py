"""torch's kernels: the library that computes them by those for the CPU."""

from __future__ import annotations

import torch

from ..activation import OPERATIONS, libraries


def register() -> None:
    """Load the library, which puts its kernels in the place of torch's."""
    torch.ops.load_library(libraries() / OPERATIONS)
    # Fused attention's kernels have no twins for the CPU: scaled_dot_product_attention is made of plain products.
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
