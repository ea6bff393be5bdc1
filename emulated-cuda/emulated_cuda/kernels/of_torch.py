"""Registers the library that computes torch's CUDA kernels with its CPU kernels."""

from __future__ import annotations

import torch

from ..libraries import OPERATIONS, libraries


def register() -> None:
    """Load the library, which replaces torch's kernels."""
    torch.ops.load_library(libraries() / OPERATIONS)
    # The kernels of fused attention have no CPU equivalents: scaled_dot_product_attention uses its math implementation.
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
