"""Kernels that write the paged KV cache."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .arguments import INTEGERS, require, unit_stride, warps


@triton.jit
def _store(
    key,
    value,
    key_cache,
    value_cache,
    slot_mapping,
    key_token,
    key_head,
    value_token,
    value_head,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    heads: tl.constexpr,
    block: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * heads + tl.arange(0, heads)[:, None]
    column = tl.arange(0, block)[None, :]
    mask = (head < num_heads) & (column < head_dim)
    to = tl.load(slot_mapping + token).to(tl.int64) * (num_heads * head_dim) + head * head_dim + column
    tl.store(key_cache + to, tl.load(key + token * key_token + head * key_head + column, mask=mask), mask=mask)
    tl.store(value_cache + to, tl.load(value + token * value_token + head * value_head + column, mask=mask), mask=mask)


def store_kv_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """See :func:`hal.ops.store_kv_cache`. It reads heads in a packed projection in place."""
    require_cache("store_kv_cache", key, key_cache, value_cache, slot_mapping)
    require(value.shape == key.shape and value.dtype is key.dtype, "store_kv_cache", key, value)
    tokens, num_heads, head_dim = key.shape
    key, value, block = unit_stride(key), unit_stride(value), triton.next_power_of_2(head_dim)
    heads = min(triton.next_power_of_2(num_heads), max(2048 // block, 1))
    tensors = key, value, key_cache, value_cache, slot_mapping.contiguous()
    sizes = *key.stride()[:2], *value.stride()[:2], num_heads, head_dim, heads, block
    _store[tokens, triton.cdiv(num_heads, heads)](*tensors, *sizes, num_warps=warps(heads * block))


def require_cache(operation: str, key: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Check that the caches are canonical and match ``key``, ``[tokens, num_kv_heads, head_dim]``.

    Raises:
        OperationError: they do not.
    """
    fits = key.dim() == 3 and key_cache.dim() == 4 and key_cache.shape[2:] == key.shape[1:]
    fits = fits and value_cache.shape == key_cache.shape and key_cache.dtype is value_cache.dtype is key.dtype
    fits = fits and key_cache.is_contiguous() and value_cache.is_contiguous()
    fits = fits and slot_mapping.shape == key.shape[:1] and slot_mapping.dtype in INTEGERS
    require(fits, operation, key, key_cache, value_cache, slot_mapping)
