"""The paged KV cache: what a model needs of one, and the memory a backend gives it."""

from __future__ import annotations

import math

import attrs
import torch
from torch import Tensor

DUMMY_BLOCK = 0
"""The block that padding rows write to. No sequence may own it."""


@attrs.frozen
class KVCacheSpec:
    """A model's wish for a cache.

    Attributes:
        num_layers: attention layers, each with a key and a value cache.
        num_kv_heads: key heads per layer.
        head_dim: elements per head.
        dtype: of keys and values.
        num_blocks: blocks that sequences can own and, before them, the dummy block.
        block_size: tokens per block.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    num_blocks: int
    block_size: int

    @property
    def num_tokens(self) -> int:
        """Tokens that sequences can hold together."""
        return (self.num_blocks - 1) * self.block_size

    @property
    def nbytes(self) -> int:
        """Bytes of a cache in the canonical layout."""
        elements = self.num_layers * 2 * self.num_blocks * self.block_size * self.num_kv_heads * self.head_dim
        return elements * self.dtype.itemsize

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of ``num_tokens`` takes."""
        return math.ceil(num_tokens / self.block_size)


@attrs.frozen
class KVCache:
    """Memory for keys and values; ``layers[i]`` is the key cache and the value cache of layer ``i``.

    In the canonical layout each is ``[num_blocks, block_size, num_kv_heads, head_dim]``, contiguous. A backend with
    another layout needs kernels for every operation that touches the cache. Block :data:`DUMMY_BLOCK` takes what
    padding rows write.
    """

    spec: KVCacheSpec
    layers: tuple[tuple[Tensor, Tensor], ...]


def canonical_kv_cache(spec: KVCacheSpec, device: torch.device) -> KVCache:
    """A zeroed cache in the canonical layout, made under inference mode so that it can be written under it."""
    shape = (spec.num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)

    def allocate() -> Tensor:
        return torch.zeros(shape, dtype=spec.dtype, device=device)

    with torch.inference_mode():
        return KVCache(spec, tuple((allocate(), allocate()) for _ in range(spec.num_layers)))
