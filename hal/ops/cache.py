"""Writes to the paged KV cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hal.ops.declaration.constraints import Draw, Sample
from hal.ops.declaration.dtypes import FLOATING
from hal.ops.declaration.operation import op


def cache_sample(
    draw: Draw, tokens: int, kv_heads: int, head_dim: int, block_size: int = 8
) -> tuple[Tensor, Tensor, Tensor]:
    """Return key and value caches with random contents, and distinct slots for ``tokens``, for samples."""
    num_blocks = tokens // block_size + 2
    shape = (num_blocks, block_size, kv_heads, head_dim)
    slots = draw.permutation(num_blocks * block_size)[:tokens]
    return draw.normal(*shape), draw.normal(*shape), slots.to(torch.int32)


def _store_samples(draw: Draw) -> Iterator[Sample]:
    for tokens, kv_heads, head_dim, block_size in ((1, 1, 64, 8), (13, 2, 128, 8), (5, 4, 32, 16)):
        key, value = draw.normal(tokens, kv_heads, head_dim), draw.normal(tokens, kv_heads, head_dim)
        yield key, value, *cache_sample(draw, tokens, kv_heads, head_dim, block_size)
    packed = draw.normal(6, 4 * 32)
    yield packed[:, 64:96].view(6, 1, 32), packed[:, 96:].view(6, 1, 32), *cache_sample(draw, 6, 1, 32)


@op(
    samples=_store_samples,
    axes={
        "key": "tokens num_kv_heads head_dim",
        "value": "tokens num_kv_heads head_dim",
        "key_cache": "num_blocks block_size num_kv_heads head_dim",
        "value_cache": "num_blocks block_size num_kv_heads head_dim",
        "slot_mapping": "tokens",
    },
    dtypes={"key": FLOATING, "value": "key", "key_cache": "key", "value_cache": "key", "slot_mapping": torch.int32},
    rowwise="tokens",
    state=("key_cache", "value_cache"),
    mutates=("key_cache", "value_cache"),
)
def store_kv_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write each token's key and value into its slot of the paged cache. Other slots stay unchanged.

    A slot is ``block * block_size + offset``. Tokens may share only slots that are never read (padding), where the
    result is undefined.

    Args:
        key: ``[tokens, num_kv_heads, head_dim]``, of the cache's dtype.
        value: as ``key``.
        key_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]``, contiguous; written in place.
        value_cache: as ``key_cache``.
        slot_mapping: ``[tokens]``, int32.

    Source: the paged layout of Kwon et al., *PagedAttention*, 2023.
    """
    slots = slot_mapping.long()
    key_cache.view(-1, *key_cache.shape[2:])[slots] = key
    value_cache.view(-1, *value_cache.shape[2:])[slots] = value
