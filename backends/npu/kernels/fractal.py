"""A KV cache in FRACTAL_NZ, which npu_qkv_rms_norm_rope_cache writes and attention reads as it is.

A block's tokens lie in tiles of 16 elements: ``[num_blocks, num_kv_heads * head_dim / 16, block_size, 16]``. Only these
kernels see that: to others a cache has the canonical shape, over memory that is laid out otherwise.
"""

from __future__ import annotations

from typing import Any

import torch
import torch_npu
from torch import Tensor

from hal.errors import OperationError
from hal.ops.kernels.kernel_table import Kernel
from hal.ops.kernels.prepared_arguments import PreparingKernel

from ..soc import BLOCK_SIZES
from .attention import FusedAttention

TILE = 16
"""Elements of 16 bits in a tile's row of 32 bytes."""
HEAD_DIM = 128
"""The only one that npu_qkv_rms_norm_rope_cache takes."""


def tiles(cache: Tensor) -> Tensor:
    """The memory of a cache as it is laid out: ``[num_blocks, num_kv_heads * head_dim / 16, block_size, 16]``."""
    blocks, block_size, heads, head_dim = cache.shape
    return cache.view(blocks, heads * head_dim // TILE, block_size, TILE)


def tiles_by_head(cache: Tensor) -> Tensor:
    """As attention takes it: ``[num_blocks, num_kv_heads, head_dim / 16, block_size, 16]``."""
    blocks, block_size, heads, head_dim = cache.shape
    return cache.view(blocks, heads, head_dim // TILE, block_size, TILE)


def kernels(device: torch.device) -> dict[str, Kernel]:
    """The kernels that touch such a cache, by operation."""
    return {
        "paged_attention": FusedAttention(device, tiles_by_head, _refuse_blocks),
        "split_qkv_rmsnorm_rope_cache": PreparingKernel(split_qkv_rmsnorm_rope_cache, {"slot_mapping": Tensor.long}),
        "store_kv_cache": store_kv_cache,
    }


def _refuse_blocks(query: Tensor, key_cache: Tensor, *rest: Any) -> Tensor:
    raise OperationError(
        f"prefill over a cache in FRACTAL_NZ with blocks of {key_cache.shape[1]} tokens",
        f"make the cache with blocks of {', '.join(map(str, BLOCK_SIZES))}",
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
    """See :func:`hal.ops.split_qkv_rmsnorm_rope_cache`, with slots in int64. It rounds once, after the rotation."""
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
        [1, tokens, num_heads + 2 * num_kv_heads, head_dim],  # as one sequence: it asks for blocks for each
        [num_heads, num_kv_heads, num_kv_heads],
        epsilon=eps,
        cache_mode="PA_NZ",
    )
    return query.view(tokens, num_heads, head_dim)
