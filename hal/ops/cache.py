"""The paged KV cache: writes, and a cache in 8 bits with attention over it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hal.ops.attention import AttentionOptions, attend_to, attention_sample
from hal.ops.declaration.constraints import Draw, Sample
from hal.ops.declaration.dtypes import FLOATING
from hal.ops.declaration.operation import op
from hal.ops.forms import float8_bits, float8_values
from hal.ops.quantization import NEAR_TIES, SCALES


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
    },
    dtypes={"key": FLOATING, "value": "key", "key_cache": "key", "value_cache": "key"},
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


INTEGERS, FLOAT8 = torch.int8, torch.uint8
"""The dtypes of a cache: numbers from -128 to 127, or the bits of float8 (e4m3)."""
LARGEST = {INTEGERS: 127, FLOAT8: 448}
"""The number that the largest element of a head becomes."""

_CACHE = "num_blocks block_size num_kv_heads head_dim"
_SCALES = "num_blocks block_size num_kv_heads"


def quantized_heads(x: Tensor, dtype: torch.dtype, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Quantize heads as :func:`store_quantized_kv_cache` declares it.

    Args:
        x: ``[tokens, num_kv_heads, head_dim]``, floating.
        dtype: that of the cache.
        scale: ``[num_kv_heads]``, float32, or None.

    Returns:
        the numbers, and the scales ``[tokens, num_kv_heads]``.
    """
    wide, largest = x.float(), LARGEST[dtype]
    scales = wide.abs().amax(-1) / largest if scale is None else scale.expand(x.shape[:2])
    divided = wide / torch.where(scales == 0, 1.0, scales).unsqueeze(-1)
    if dtype is INTEGERS:
        return divided.round().clamp(-128, 127).to(INTEGERS), scales
    return float8_bits(divided), scales


def widened_heads(numbers: Tensor, scales: Tensor) -> Tensor:
    """Return the keys or values ``[..., num_kv_heads, head_dim]`` of a quantized cache, in float32."""
    wide = numbers.float() if numbers.dtype is INTEGERS else float8_values(numbers)
    return wide * scales.unsqueeze(-1)


def _scales(draw: Draw, *shape: int) -> Tensor:
    return draw.integers(50, 200, *shape, dtype=torch.int64).float() * 1e-4


def _numbers(draw: Draw, dtype: torch.dtype, *shape: int) -> Tensor:
    if dtype is INTEGERS:
        return draw.integers(-127, 128, *shape, dtype=INTEGERS)
    signs = draw.integers(0, 2, *shape, dtype=torch.int64) << 7
    return (draw.integers(0, 0x78, *shape, dtype=torch.int64) | signs).to(FLOAT8)


def _store_quantized_samples(draw: Draw) -> Iterator[Sample]:
    for dtype in LARGEST:
        for tokens, kv_heads, head_dim, block_size in ((1, 1, 64, 8), (13, 2, 128, 8), (5, 4, 32, 16)):
            blocks = tokens // block_size + 2
            caches = [_numbers(draw, dtype, blocks, block_size, kv_heads, head_dim) for _ in range(2)]
            scales = [_scales(draw, blocks, block_size, kv_heads) for _ in range(2)]
            slots = draw.permutation(blocks * block_size)[:tokens].to(torch.int32)
            packed = draw.normal(tokens, 3 * kv_heads * head_dim).unflatten(1, (3, kv_heads, head_dim))
            fixed = tokens == 5
            given = [_scales(draw, kv_heads) if fixed else None for _ in range(2)]
            yield packed[:, 1], packed[:, 2], *given, *caches, *scales, slots
    zeros = draw.tensor([[[0.0] * 32] * 4, [[1.0, -3.0] * 16] * 4], draw.dtype)
    yield zeros, -zeros, None, None, *(each.clone() for each in (*caches, *scales)), slots[:2]
    given = [draw.tensor([0.0078125] * 4, torch.float32)] * 2  # Some numbers are out of range.
    yield 4 * packed[:, 1], packed[:, 2], *given, *(each.clone() for each in (*caches, *scales)), slots


@op(
    samples=_store_quantized_samples,
    axes={
        "key": "tokens num_kv_heads head_dim",
        "value": "tokens num_kv_heads head_dim",
        "key_scale": "num_kv_heads",
        "value_scale": "num_kv_heads",
        "keys": _CACHE,
        "values": _CACHE,
        "key_scales": _SCALES,
        "value_scales": _SCALES,
    },
    dtypes={
        "key": FLOATING,
        "value": "key",
        "key_scale": torch.float32,
        "value_scale": torch.float32,
        "keys": (torch.int8, torch.uint8),
        "values": "keys",
        "key_scales": torch.float32,
        "value_scales": torch.float32,
    },
    rowwise="tokens",
    state=("keys", "values", "key_scales", "value_scales"),
    mutates=("keys", "values", "key_scales", "value_scales"),
    tolerance=SCALES,
    off_by_one=NEAR_TIES,
)
def store_quantized_kv_cache(
    key: Tensor,
    value: Tensor,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor,
    value_scales: Tensor,
    slot_mapping: Tensor,
) -> None:
    """Quantize each token's key and value, and write them with their scales into its slot.

    A head's scale is its largest absolute element divided by 127 in int8, and by 448 in float8, unless one is given. An
    element is divided by it in float32 and rounded half to even; in int8 it is bounded to -128 and 127, in float8 to
    -448 and 448. A head of zeros has the scale 0. A head with NaN or infinity has a scale that is not finite, unless
    one is given; the int8 of a NaN is then unspecified.

    Args:
        key: ``[tokens, num_kv_heads, head_dim]``, floating.
        value: as ``key``.
        key_scale: ``[num_kv_heads]``, float32, positive: the scale of each head; None for one of each token.
        value_scale: as ``key_scale``.
        keys: ``[num_blocks, block_size, num_kv_heads, head_dim]``, int8, or uint8 with the bits of float8 (e4m3);
            written in place.
        values: as ``keys``.
        key_scales: ``[num_blocks, block_size, num_kv_heads]``, float32; written in place.
        value_scales: as ``key_scales``.
        slot_mapping: as of :func:`store_kv_cache`.
    """
    slots = slot_mapping.long()
    for x, scale, cache, scales in ((key, key_scale, keys, key_scales), (value, value_scale, values, value_scales)):
        place = slots // cache.shape[1], slots % cache.shape[1]
        cache[place], scales[place] = quantized_heads(x, cache.dtype, scale)


def _attention_samples(draw: Draw) -> Iterator[Sample]:
    def sample(dtype: torch.dtype, *lengths: list[int], **options: object) -> Sample:
        query, key_cache, _, *rest = attention_sample(draw, *lengths, **options)  # type: ignore[arg-type]
        shape = key_cache.shape
        numbers = [_numbers(draw, dtype, *shape) for _ in range(2)]
        scales = [_scales(draw, *shape[:3]) * (1.0 if dtype is INTEGERS else 0.5) for _ in range(2)]
        return query, *numbers, *scales, *rest

    for dtype in LARGEST:
        yield sample(dtype, [5, 17, 1], [5, 17, 1])
        yield sample(dtype, [3, 16], [21, 48], kv_heads=1)
        yield sample(dtype, [1, 1, 1, 1], [33, 16, 1, 15], head_dim=128, block_size=32)
        yield sample(dtype, [1, 1, 1], [20, 0, 0])
    yield sample(dtype, [9, 1], [30, 40], heads=2, window=7)
    yield sample(INTEGERS, [1, 1], [30, 40], window=16, block_size=32)
    yield sample(INTEGERS, [4, 1], [4, 33], softcap=2.0, head_dim=48)
    yield sample(INTEGERS, [1, 1, 1], [33, 0, 7], sinks=True, block_size=32)
    yield sample(dtype, [9, 1, 5], [30, 40, 5], heads=6, head_dim=128, sinks=True)
    yield sample(INTEGERS, [64, 40], [64, 90], head_dim=32)


@op(
    samples=_attention_samples,
    axes={
        "query": "tokens num_heads head_dim",
        "keys": _CACHE,
        "values": _CACHE,
        "key_scales": _SCALES,
        "value_scales": _SCALES,
        "sinks": "num_heads",
        "return": "tokens num_heads head_dim",
    },
    dtypes={
        "query": FLOATING,
        "keys": (torch.int8, torch.uint8),
        "values": "keys",
        "key_scales": torch.float32,
        "value_scales": torch.float32,
        "sinks": "query",
        "return": "query",
    },
    rowwise="tokens",
    state=("keys", "values", "key_scales", "value_scales"),
    host=("query_start_loc_host", "kv_lens_host"),
)
def quantized_paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor,
    value_scales: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    kv_lens: Tensor,
    query_start_loc_host: Tensor,
    kv_lens_host: Tensor,
    sinks: Tensor | None,
    options: AttentionOptions,
) -> Tensor:
    """Attend as :func:`paged_attention`, over a cache that :func:`store_quantized_kv_cache` writes.

    A key or value is its numbers times the scale of its token and head. A kernel may round it to query's dtype.

    Args:
        query: ``[tokens, num_heads, head_dim]``, floating.
        keys: ``[num_blocks, block_size, num_kv_heads, head_dim]``, int8, or uint8 with the bits of float8 (e4m3).
        values: as ``keys``.
        key_scales: ``[num_blocks, block_size, num_kv_heads]``, float32.
        value_scales: as ``key_scales``.
        block_table: as of :func:`paged_attention`, like the arguments that follow.
        query_start_loc, kv_lens, query_start_loc_host, kv_lens_host, sinks, options: see there.

    Returns:
        ``[tokens, num_heads, head_dim]``, of query's dtype.
    """
    blocks = block_table.long()
    wide = widened_heads(keys[blocks], key_scales[blocks]), widened_heads(values[blocks], value_scales[blocks])
    return attend_to(query, *wide, query_start_loc, kv_lens, sinks, options)
