"""Rotary embedding, alone and fused with the norms of heads before it and the cache write after it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arguments import require, unit_stride
from .cache import require_cache
from .interpreter import rounded
from .launching import launch


@triton.jit
def _heads(
    query,
    key,
    value,
    query_weight,
    key_weight,
    cos,
    sin,
    new_query,
    new_key,
    new_value,
    slot_mapping,
    query_token,
    query_head,
    key_token,
    key_head,
    value_token,
    value_head,
    cos_token,
    sin_token,
    eps,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    rotary_dim: tl.constexpr,
    interleaved: tl.constexpr,
    heads: tl.constexpr,
    block: tl.constexpr,
    rest: tl.constexpr,
):
    """Process a token's heads, ``heads`` at a time: those of query, then of key, then of value if it is given.

    Norms and values require whole heads in halves.
    """
    dtype: tl.constexpr = new_query.dtype.element_ty
    half: tl.constexpr = rotary_dim // 2
    # The elements of a pair are `apart`, and pairs `step`.
    step: tl.constexpr = 2 if interleaved else 1
    apart: tl.constexpr = 1 if interleaved else half
    query_tiles: tl.constexpr = (num_heads + heads - 1) // heads
    kv_tiles: tl.constexpr = (num_kv_heads + heads - 1) // heads
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, block)[None, :]
    place = token
    if slot_mapping is not None:
        place = tl.load(slot_mapping + token).to(tl.int64)

    if tile < query_tiles + kv_tiles:
        # Selects instead of branches, so that the compiler keeps the alignment of pointers.
        of_query = tile < query_tiles
        head = tl.where(of_query, tile, tile - query_tiles) * heads + tl.arange(0, heads)[:, None]
        mask = (head < tl.where(of_query, num_heads, num_kv_heads)) & (column < half)
        source = tl.where(of_query, query + token * query_token, key + token * key_token)
        source = source + head * tl.where(of_query, query_head, key_head)
        pair = source + column * step
        first = tl.load(pair, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(pair + apart, mask=mask, other=0.0).to(tl.float32)
        if query_weight is not None:
            weight = tl.where(of_query, query_weight, key_weight) + column
            squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
            inverse = tl.rsqrt(squares / head_dim + eps)[:, None]
            of_first = tl.load(weight, mask=column < half, other=0.0).to(tl.float32)
            of_second = tl.load(weight + half, mask=column < half, other=0.0).to(tl.float32)
            first = rounded(first * inverse * of_first, dtype).to(tl.float32)
            second = rounded(second * inverse * of_second, dtype).to(tl.float32)
        # Both elements of a pair have the same cos and sin.
        cosine = tl.load(cos + token * cos_token + column * step, mask=column < half, other=0.0).to(tl.float32)
        sine = tl.load(sin + token * sin_token + column * step, mask=column < half, other=0.0).to(tl.float32)
        target = tl.where(
            of_query, new_query + token * (num_heads * head_dim), new_key + place * (num_kv_heads * head_dim)
        )
        target = target + head * head_dim
        pair = target + column * step
        tl.store(pair, rounded(first * cosine - second * sine, dtype), mask=mask)
        tl.store(pair + apart, rounded(second * cosine + first * sine, dtype), mask=mask)
        if rotary_dim < head_dim:
            other = rotary_dim + tl.arange(0, rest)[None, :]
            mask = (head < tl.where(of_query, num_heads, num_kv_heads)) & (other < head_dim)
            tl.store(target + other, tl.load(source + other, mask=mask), mask=mask)
    elif value is not None:
        head = (tile - query_tiles - kv_tiles) * heads + tl.arange(0, heads)[:, None]
        # Names of their own: a name that both branches assign must have the same shape in both.
        taken = (head < num_kv_heads) & (column < half)
        given = value + token * value_token + head * value_head + column
        slot = new_value + place * (num_kv_heads * head_dim) + head * head_dim + column
        tl.store(slot, tl.load(given, mask=taken), mask=taken)
        tl.store(slot + half, tl.load(given + half, mask=taken), mask=taken)


def rotary_embedding(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """See :func:`hal.ops.rotary_embedding`. It reads heads in a packed projection in place."""
    new_query, new_key = _empty(query), _empty(key)
    _launch("rotary_embedding", query, key, cos, sin, new_query, new_key, interleaved=interleaved)
    return new_query, new_key


def split_qkv_rmsnorm_rope(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`hal.ops.split_qkv_rmsnorm_rope`. Value is a view of ``qkv``."""
    query, key, value = _split("split_qkv_rmsnorm_rope", qkv, q_weight, num_heads, num_kv_heads)
    new_query, new_key = _empty(query), _empty(key)
    norms = q_weight, k_weight, eps
    _launch("split_qkv_rmsnorm_rope", query, key, cos, sin, new_query, new_key, norms=norms)
    return new_query, new_key, value


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
    """See :func:`hal.ops.split_qkv_rmsnorm_rope_cache`. It writes key and value directly to their slots."""
    operation = "split_qkv_rmsnorm_rope_cache"
    query, key, value = _split(operation, qkv, q_weight, num_heads, num_kv_heads)
    require_cache(operation, key, key_cache, value_cache, slot_mapping)
    new_query = _empty(query)
    written = value, value_cache, slot_mapping.contiguous()
    norms = q_weight, k_weight, eps
    _launch(operation, query, key, cos, sin, new_query, key_cache, norms=norms, written=written)
    return new_query


def _split(operation: str, qkv: Tensor, weight: Tensor, num_heads: int, num_kv_heads: int) -> list[Tensor]:
    """Return views ``[tokens, heads, head_dim]`` of query, key and value."""
    counts, head_dim = (num_heads, num_kv_heads, num_kv_heads), weight.shape[0]
    require(qkv.dim() == 2 and qkv.shape[1] == sum(counts) * head_dim, operation, qkv, weight)
    heads = unit_stride(qkv).unflatten(1, (sum(counts), head_dim))
    return list(heads.split(counts, dim=1))


def _launch(
    operation: str,
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    new_query: Tensor,
    new_key: Tensor,
    *,
    norms: tuple[Tensor, Tensor, float] | tuple[None, None, float] = (None, None, 0.0),
    written: tuple[Tensor, Tensor, Tensor] | tuple[None, None, None] = (None, None, None),
    interleaved: bool = False,
) -> None:
    """Launch the kernel.

    Args:
        norms: the weights of query's and key's norm, and epsilon.
        written: value, its cache, and the slots of key and value.
        interleaved: as in :func:`hal.ops.rotary_embedding`. With norms, whole heads are rotated in halves.
    """
    tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    (query_weight, key_weight, eps), (value, new_value, slots) = norms, written
    fits = key.shape[0] == tokens and key.shape[2] == head_dim and head_dim % 2 == 0
    rotary_dim = cos.shape[-1]
    fits = fits and cos.shape == sin.shape == (tokens, rotary_dim) and rotary_dim % 2 == 0 and rotary_dim <= head_dim
    fits = fits and (rotary_dim == head_dim or query_weight is None)
    fits = fits and key.dtype is query.dtype and cos.dtype is sin.dtype and cos.dtype in (query.dtype, torch.float32)
    require(fits, operation, query, key, cos, sin)
    if query_weight is not None and key_weight is not None:
        fits = query_weight.shape == key_weight.shape == (head_dim,)
        fits = fits and query_weight.dtype is key_weight.dtype and query_weight.dtype in (query.dtype, torch.float32)
        require(fits, operation, query, query_weight, key_weight)
        query_weight, key_weight = unit_stride(query_weight), unit_stride(key_weight)
    query, key, cos, sin = unit_stride(query), unit_stride(key), unit_stride(cos), unit_stride(sin)
    block = max(triton.next_power_of_2(rotary_dim // 2), 1)
    heads = max(512 // block, 1)
    kv_tiles = triton.cdiv(num_kv_heads, heads)
    tiles = triton.cdiv(num_heads, heads) + kv_tiles * (1 if value is None else 2)
    tensors = query, key, value, query_weight, key_weight, cos, sin, new_query, new_key, new_value, slots
    sizes = *query.stride()[:2], *key.stride()[:2], *((0, 0) if value is None else value.stride()[:2]), cos.stride(0)
    further = max(triton.next_power_of_2(head_dim - rotary_dim), 1)
    constants = num_heads, num_kv_heads, head_dim, rotary_dim, interleaved, heads, block, further
    given = *tensors, *sizes, sin.stride(0), eps, *constants
    results = [each for each in (new_query, new_key, new_value) if each is not None]
    launch(operation, _heads, (tokens, tiles), *given, written=results, num_warps=2)


def _empty(like: Tensor) -> Tensor:
    """Return a contiguous tensor of the shape of ``like``."""
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)
