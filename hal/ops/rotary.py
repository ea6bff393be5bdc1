"""Rotary position embedding, and its fusions with the projections before it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hal.ops.cache import cache_sample, store_kv_cache
from hal.ops.declaration.constraints import Draw, Sample
from hal.ops.declaration.dtypes import FLOATING
from hal.ops.declaration.operation import fused_op, op
from hal.ops.norm import rms_norm


def _angles(draw: Draw, tokens: int, width: int, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    pairs = draw.normal(tokens, width // 2).float()
    angles = pairs.repeat_interleave(2, dim=1) if interleaved else pairs.repeat(1, 2)
    return angles.cos().to(draw.dtype), angles.sin().to(draw.dtype)


def _rotary_samples(draw: Draw) -> Iterator[Sample]:
    for tokens, heads, kv_heads, head_dim in ((1, 4, 2, 64), (9, 8, 1, 128), (3, 2, 2, 32)):
        yield (
            draw.normal(tokens, heads, head_dim),
            draw.normal(tokens, kv_heads, head_dim),
            *_angles(draw, tokens, head_dim),
            False,
        )
    turned = draw.normal(3, 64, 4).transpose(1, 2), draw.normal(3, 64, 2).transpose(1, 2)  # no unit stride
    yield *turned, *_angles(draw, 3, 64), False
    packed = draw.normal(5, 4 * 64)  # views into a merged projection
    yield packed[:, :128].view(5, 2, 64), packed[:, 128:192].view(5, 1, 64), *_angles(draw, 5, 64), False
    for tokens, heads, head_dim, width in ((4, 2, 64, 16), (1, 4, 32, 24), (3, 1, 64, 64)):  # part of a head, or pairs
        for interleaved in (False, True):
            pair = draw.normal(tokens, heads, head_dim), draw.normal(tokens, 1, head_dim)
            cos, sin = _angles(draw, tokens, width, interleaved)
            yield *pair, cos, sin, interleaved
            yield *pair, cos.float(), sin.float(), interleaved
    query = draw.normal(4, 3, 64)
    yield query, query[:, :0], *_angles(draw, 4, 64), False


@op(
    samples=_rotary_samples,
    axes={
        "query": "tokens num_heads head_dim",
        "key": "tokens num_kv_heads head_dim",
        "cos": "tokens rotary_dim",
        "sin": "tokens rotary_dim",
        "return": ("tokens num_heads head_dim", "tokens num_kv_heads head_dim"),
    },
    dtypes={
        "query": FLOATING,
        "key": "query",
        "cos": ("query", torch.float32),
        "sin": "cos",
        "return": ("query", "query"),
    },
    rowwise="tokens",
)
def rotary_embedding(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate query and key by their positions, all elements of a head or the first ones.

    ``x * cos + rotate_half(x) * sin``, computed in float32 and rounded to x's dtype once. The halves of the rotated
    elements are the real and imaginary parts (Neox), and ``rotate_half`` of ``(a, b)`` is ``(-b, a)``. Interleaved
    elements are pairs of both, and ``rotate_half`` of ``(a0, b0, a1, b1, ...)`` is ``(-b0, a0, -b1, a1, ...)``.

    Args:
        query: ``[tokens, num_heads, head_dim]``, floating.
        key: ``[tokens, num_kv_heads, head_dim]``, of query's dtype. A layer that has no keys passes 0 heads.
        cos: ``[tokens, rotary_dim]``, of query's dtype or float32, for the first ``rotary_dim`` elements of a head;
            others stay. Both elements of a pair have the same value. Computed once per step.
        sin: as ``cos``.
        interleaved: whether the elements of a pair are adjacent, rather than in both halves.

    Returns:
        The rotated query and key, of the same shapes and dtype.

    Source: Su et al., *RoFormer*, 2021; halves as in GPT-NeoX.
    """
    return _rotate(query, cos, sin, interleaved), _rotate(key, cos, sin, interleaved)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    width = cos.shape[-1]
    partial = width != x.shape[-1]
    wide = (x[..., :width] if partial else x).float()
    if interleaved:
        half = torch.stack((-wide[..., 1::2], wide[..., ::2]), dim=-1).flatten(-2)
    else:
        first, second = wide.chunk(2, dim=-1)
        half = torch.cat((-second, first), dim=-1)
    rotated = (wide * cos.float().unsqueeze(1) + half * sin.float().unsqueeze(1)).to(x.dtype)
    return torch.cat((rotated, x[..., width:]), dim=-1) if partial else rotated


def _split_samples(draw: Draw) -> Iterator[Sample]:
    for tokens, heads, kv_heads, head_dim in ((1, 4, 2, 64), (6, 2, 1, 128), (11, 3, 3, 32)):
        qkv = draw.normal(tokens, (heads + 2 * kv_heads) * head_dim)
        weights = draw.normal(head_dim), draw.normal(head_dim)
        yield qkv, *weights, *_angles(draw, tokens, head_dim), 1e-6, heads, kv_heads


_SPLIT_AXES = {
    "qkv": "tokens (num_heads+2*num_kv_heads)*head_dim",
    "q_weight": "head_dim",
    "k_weight": "head_dim",
    "cos": "tokens head_dim",
    "sin": "tokens head_dim",
}
_SPLIT_DTYPES = {"qkv": FLOATING, "q_weight": "qkv", "k_weight": "qkv", "cos": "qkv", "sin": "qkv"}


def _wide_split_samples(draw: Draw) -> Iterator[Sample]:
    yield from _split_samples(draw)
    for qkv, q_weight, k_weight, *others in _split_samples(draw):
        yield qkv, q_weight.float(), k_weight.float(), *others


@fused_op(
    samples=_wide_split_samples,
    axes={
        **_SPLIT_AXES,
        "return": ("tokens num_heads head_dim", "tokens num_kv_heads head_dim", "tokens num_kv_heads head_dim"),
    },
    dtypes={
        **_SPLIT_DTYPES,
        "q_weight": ("qkv", torch.float32),
        "k_weight": "q_weight",
        "return": ("qkv", "qkv", "qkv"),
    },
    rowwise="tokens",
)
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
    """Split a merged projection into heads, then normalize and rotate query and key.

    Results are rounded where :func:`rms_norm` and :func:`rotary_embedding` round.

    Args:
        qkv: ``[tokens, (num_heads + 2 * num_kv_heads) * head_dim]``, floating: query, key, value.
        q_weight: ``[head_dim]``, of qkv's dtype or float32.
        k_weight: as ``q_weight``.
        cos: ``[tokens, head_dim]``, of qkv's dtype.
        sin: as ``cos``.
        eps: added to the mean square in both norms.
        num_heads: the number of query heads.
        num_kv_heads: the number of key heads, equal to the number of value heads.

    Returns:
        Query ``[tokens, num_heads, head_dim]``, key and value ``[tokens, num_kv_heads, head_dim]``, of qkv's dtype.
    """
    head_dim = q_weight.shape[0]
    query, key, value = qkv.split([num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim], dim=-1)
    query = rms_norm(query.view(-1, num_heads, head_dim), q_weight, eps)
    key = rms_norm(key.view(-1, num_kv_heads, head_dim), k_weight, eps)
    query, key = rotary_embedding(query, key, cos, sin)
    return query, key, value.view(-1, num_kv_heads, head_dim)


def _split_cache_samples(draw: Draw) -> Iterator[Sample]:
    for arguments in _split_samples(draw):
        qkv, q_weight, kv_heads = arguments[0], arguments[1], arguments[7]
        block_size = 16 if kv_heads == 2 else 8
        yield *arguments, *cache_sample(draw, qkv.shape[0], kv_heads, q_weight.shape[0], block_size)


@fused_op(
    samples=_split_cache_samples,
    axes={
        **_SPLIT_AXES,
        "key_cache": "num_blocks block_size num_kv_heads head_dim",
        "value_cache": "num_blocks block_size num_kv_heads head_dim",
        "return": "tokens num_heads head_dim",
    },
    dtypes={**_SPLIT_DTYPES, "key_cache": "qkv", "value_cache": "qkv", "return": "qkv"},
    rowwise="tokens",
    state=("key_cache", "value_cache"),
    mutates=("key_cache", "value_cache"),
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
    """Apply :func:`split_qkv_rmsnorm_rope`, then :func:`store_kv_cache` to key and value.

    Args:
        qkv: ``[tokens, (num_heads + 2 * num_kv_heads) * head_dim]``, floating.
        q_weight: ``[head_dim]``, of qkv's dtype.
        k_weight: as ``q_weight``.
        cos: ``[tokens, head_dim]``, of qkv's dtype.
        sin: as ``cos``.
        eps: added to the mean square in both norms.
        num_heads: the number of query heads.
        num_kv_heads: the number of key heads, equal to the number of value heads.
        key_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]``; written in place.
        value_cache: as ``key_cache``.
        slot_mapping: ``[tokens]``, int32.

    Returns:
        Query ``[tokens, num_heads, head_dim]``, of qkv's dtype.
    """
    query, key, value = split_qkv_rmsnorm_rope(qkv, q_weight, k_weight, cos, sin, eps, num_heads, num_kv_heads)
    store_kv_cache(key, value, key_cache, value_cache, slot_mapping)
    return query
