"""Kernels for a KV cache in FRACTAL_NZ, which npu_qkv_rms_norm_rope_cache writes and attention reads directly.

A block consists of tiles of 16 elements: ``[num_blocks, num_kv_heads * head_dim / 16, block_size, 16]``. The cache
tensor keeps the canonical shape. Only these kernels view its memory in the shape of the tiles.
"""

from __future__ import annotations

from typing import Any

import torch
import torch_npu
from torch import Tensor

from hal.errors import OperationError
from hal.ops.kernels.kernel_table import Kernel
from hal.vendor import PartialKernel, PreparingKernel

from ..soc import BLOCK_SIZES
from .attention import OPTIONS, FusedAttention

TILE = 16
"""16-bit elements in a tile's row of 32 bytes."""
HEAD_DIM = 128
"""The only head dimension that npu_qkv_rms_norm_rope_cache supports."""


def tiles(cache: Tensor) -> Tensor:
    """Return a view of a cache as tiles: ``[num_blocks, num_kv_heads * head_dim / 16, block_size, 16]``."""
    blocks, block_size, heads, head_dim = cache.shape
    return cache.view(blocks, heads * head_dim // TILE, block_size, TILE)


def tiles_by_head(cache: Tensor) -> Tensor:
    """Return attention's view of a cache: ``[num_blocks, num_kv_heads, head_dim / 16, block_size, 16]``."""
    blocks, block_size, heads, head_dim = cache.shape
    return cache.view(blocks, heads, head_dim // TILE, block_size, TILE)


def kernels(device: torch.device) -> dict[str, Kernel]:
    """Return the kernels that read or write a cache in FRACTAL_NZ, by operation."""
    return {
        "paged_attention": PartialKernel(
            "paged_attention",
            FusedAttention(device, tiles_by_head, _refuse_blocks),
            supports=OPTIONS,
            otherwise=_refuse_options,
        ),
        "split_qkv_rmsnorm_rope_cache": PreparingKernel(split_qkv_rmsnorm_rope_cache, {"slot_mapping": Tensor.long}),
        "store_kv_cache": store_kv_cache,
    }


def _refuse_blocks(query: Tensor, key_cache: Tensor, *rest: Any) -> Tensor:
    raise OperationError(
        f"the cache in FRACTAL_NZ has blocks of {key_cache.shape[1]} tokens, which prefill does not support",
        f"allocate the cache with a block size of {', '.join(map(str, BLOCK_SIZES))}",
    )


def _refuse_options(*arguments: Any) -> Tensor:
    sinks, options = arguments[-2:]
    raise OperationError(
        f"attention has {options}{'' if sinks is None else ' and sinks'}, and CANN's attention over a cache in "
        f"FRACTAL_NZ supports only {' and '.join(OPTIONS)}",
        "remove the driver option nz_cache",
    )


def store_kv_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """See :func:`hal.ops.store_kv_cache`."""
    torch_npu.npu_scatter_pa_kv_cache(
        key.contiguous(), value.contiguous(), tiles(key_cache), tiles(value_cache), slot_mapping, cache_mode="PA_NZ"
    )


def split_qkv_rmsnorm_rope_cache(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """See :func:`hal.ops.split_qkv_rmsnorm_rope_cache`. Slots are int64. It rounds once, after the rotation."""
    tokens, head_dim = qkv.shape[0], q_weight.shape[0]
    query = qkv.new_empty(tokens, num_heads * head_dim)
    if not tokens:
        return query.view(tokens, num_heads, head_dim)
    torch_npu.npu_qkv_rms_norm_rope_cache(
        qkv,
        q_weight,
        k_weight,
        cos,
        sin,
        slot_mapping,
        query,
        tiles(key_cache),
        tiles(value_cache),
        [1, tokens, num_heads + 2 * num_kv_heads, head_dim],  # one sequence: the kernel requires blocks for each
        [num_heads, num_kv_heads, num_kv_heads],
        epsilon=eps,
        cache_mode="PA_NZ",
    )
    return query.view(tokens, num_heads, head_dim)
