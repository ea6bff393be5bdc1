"""Latent attention: all heads attend to one latent and one rotary row of each token, in a paged cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hal.ops.attention import AttentionOptions, attend_to, attention_sample
from hal.ops.declaration.constraints import Draw, Sample
from hal.ops.declaration.dtypes import FLOATING
from hal.ops.declaration.operation import fused_op, op

_CACHES = {"latent_cache": "num_blocks block_size rank", "rope_cache": "num_blocks block_size rope_dim"}


def _store_samples(draw: Draw) -> Iterator[Sample]:
    for tokens, rank, rope_dim, block_size in ((1, 32, 16, 8), (13, 512, 64, 8), (5, 64, 32, 16)):
        rows, blocks = draw.normal(tokens, rank + rope_dim), tokens // block_size + 2
        caches = (draw.normal(blocks, block_size, size) for size in (rank, rope_dim))
        slots = draw.permutation(blocks * block_size)[:tokens].to(torch.int32)
        yield rows[:, :rank], rows[:, rank:], *caches, slots


@op(
    samples=_store_samples,
    axes={"latent": "tokens rank", "rope": "tokens rope_dim", **_CACHES},
    dtypes={
        "latent": FLOATING,
        "rope": "latent",
        "latent_cache": "latent",
        "rope_cache": "latent",
    },
    rowwise="tokens",
    state=("latent_cache", "rope_cache"),
    mutates=("latent_cache", "rope_cache"),
)
def store_latent_cache(
    latent: Tensor, rope: Tensor, latent_cache: Tensor, rope_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write each token's latent and rotary row into its slot, as :func:`store_kv_cache` writes keys and values.

    Args:
        latent: ``[tokens, rank]``, of the cache's dtype.
        rope: ``[tokens, rope_dim]``, rotated, with the elements of pairs in the order of ``query_rope``.
        latent_cache: ``[num_blocks, block_size, rank]``, contiguous; written in place.
        rope_cache: ``[num_blocks, block_size, rope_dim]``, as ``latent_cache``.
        slot_mapping: as of :func:`store_kv_cache`.
    """
    slots = slot_mapping.long()
    latent_cache.flatten(0, 1)[slots] = latent
    rope_cache.flatten(0, 1)[slots] = rope


def _head_samples(draw: Draw) -> Iterator[Sample]:
    for tokens, heads, inputs, outputs in ((1, 4, 32, 64), (3, 16, 128, 512), (17, 3, 40, 24), (2, 2, 7, 5)):
        x, weight = draw.normal(tokens, heads, inputs), draw.normal(heads, outputs + 8, inputs, scale=inputs**-0.5)
        yield x, weight[:, 8:].transpose(1, 2)  # a part of a weight, whose rows are outputs
        yield x, draw.normal(heads, inputs, outputs, scale=inputs**-0.5)
        yield draw.normal(tokens, heads, inputs + 16)[..., :inputs], weight[:, 8:].transpose(1, 2)
    yield draw.normal(70, 1, 200).expand(70, 3, 200), draw.normal(3, 200, 150, scale=0.1)


@op(
    samples=_head_samples,
    axes={
        "x": "tokens num_heads in_features",
        "weight": "num_heads in_features out_features",
        "return": "tokens num_heads out_features",
    },
    dtypes={"x": FLOATING, "weight": "x", "return": "x"},
    rowwise="tokens",
)
def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply each head's rows with the matrix of the head.

    Args:
        x: ``[tokens, num_heads, in_features]``, floating.
        weight: ``[num_heads, in_features, out_features]``, of x's dtype.

    Returns:
        ``[tokens, num_heads, out_features]``, of x's dtype, contiguous.
    """
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1).contiguous()


def _samples(draw: Draw) -> Iterator[Sample]:
    def sample(*lengths: list[int], rank: int = 64, rope_dim: int = 16, **options: Any) -> Sample:
        query, cache, _, *rest, _, given = attention_sample(
            draw, *lengths, kv_heads=1, head_dim=rank + rope_dim, **options
        )
        caches = (each.contiguous() for each in cache.squeeze(2).split([rank, rope_dim], -1))
        return *query.split([rank, rope_dim], -1), *caches, *rest, given

    yield sample([1], [1])
    yield sample([5, 17, 1], [5, 17, 1], scale=0.3)  # prefill
    yield sample([3, 16], [21, 48], heads=1)  # prefill after a cached prefix
    yield sample([1, 1, 1, 1], [33, 16, 1, 15], heads=16, rank=512, rope_dim=64)  # decode
    yield sample([1, 1, 1], [20, 0, 0])  # decode with padding rows
    yield sample([40, 1], [70, 130], heads=3, rank=96, rope_dim=32, block_size=32)
    yield sample([4, 6], [4, 9], causal=False)
    yield sample([9, 1], [30, 40], window=7, softcap=2.0)


_DTYPES = {
    "query": FLOATING,
    "query_rope": "query",
    "latent_cache": "query",
    "rope_cache": "query",
    "return": "query",
}


@op(
    samples=_samples,
    axes={
        "query": "tokens num_heads rank",
        "query_rope": "tokens num_heads rope_dim",
        **_CACHES,
        "return": "tokens num_heads rank",
    },
    dtypes=_DTYPES,
    rowwise="tokens",
    state=("latent_cache", "rope_cache"),
    host=("query_start_loc_host", "kv_lens_host"),
)
def latent_attention(
    query: Tensor,
    query_rope: Tensor,
    latent_cache: Tensor,
    rope_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    kv_lens: Tensor,
    query_start_loc_host: Tensor,
    kv_lens_host: Tensor,
    options: AttentionOptions,
) -> Tensor:
    """Attend as :func:`paged_attention`, where all heads share one key, of two parts, whose first is the value.

    A score is ``(query @ latent + query_rope @ rope) * scale``, and the result the weighted sum of latents. The
    projections of keys and values from the latent are those of the query and of the result instead (absorbed).

    Args:
        query: ``[tokens, num_heads, rank]``, floating: projected to the latent.
        query_rope: ``[tokens, num_heads, rope_dim]``, rotated.
        latent_cache: ``[num_blocks, block_size, rank]``, of query's dtype; includes the new tokens.
        rope_cache: ``[num_blocks, block_size, rope_dim]``, as ``latent_cache``.
        block_table: as of :func:`paged_attention`, like the arguments that follow.
        query_start_loc, kv_lens, query_start_loc_host, kv_lens_host, options: see there.

    Returns:
        ``[tokens, num_heads, rank]``, of query's dtype.

    Source: DeepSeek-AI, *DeepSeek-V2*, 2024.
    """
    blocks, heads = block_table.long(), torch.cat((query, query_rope), -1)
    keys = torch.cat((latent_cache[blocks], rope_cache[blocks]), -1).unsqueeze(3)
    return attend_to(heads, keys, keys, query_start_loc, kv_lens, None, options)[..., : query.shape[-1]].contiguous()


def _multi_head_samples(draw: Draw) -> Iterator[Sample]:
    for (query, query_rope, *others, options), nope, value in zip(
        _samples(draw), (24, 32, 128, 128, 16, 40, 32, 24), (32, 16, 128, 96, 24, 40, 32, 16), strict=True
    ):
        (tokens, heads, rank), rope_dim = query.shape, query_rope.shape[2]
        rows = draw.normal(tokens, heads, nope + rope_dim)
        weight = draw.normal(heads, nope + value, rank, scale=rank**-0.5)
        caches, places = others[:2], others[2:]
        yield rows[..., :nope], rows[..., nope:], *caches, weight[:, :nope], weight[:, nope:], *places, options


@fused_op(
    samples=_multi_head_samples,
    axes={
        "query": "tokens num_heads nope_dim",
        "query_rope": "tokens num_heads rope_dim",
        **_CACHES,
        "key_weight": "num_heads nope_dim rank",
        "value_weight": "num_heads value_dim rank",
        "return": "tokens num_heads value_dim",
    },
    dtypes={**_DTYPES, "key_weight": "query", "value_weight": "query"},
    rowwise="tokens",
    state=("latent_cache", "rope_cache"),
    host=("query_start_loc_host", "kv_lens_host"),
)
def multi_head_latent_attention(
    query: Tensor,
    query_rope: Tensor,
    latent_cache: Tensor,
    rope_cache: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    kv_lens: Tensor,
    query_start_loc_host: Tensor,
    kv_lens_host: Tensor,
    options: AttentionOptions,
) -> Tensor:
    """Attend to each head's keys and values, which are projections of cached latents.

    A key of a head is ``[key_weight @ latent | rope]``, and a value ``value_weight @ latent``. The body is the absorbed
    form, in which the projections are applied to queries and results, and :func:`latent_attention` reads the cache. A
    kernel may expand keys and values for many queries instead, which multiplies less, and rounds them to the dtype.

    Args:
        query: ``[tokens, num_heads, nope_dim]``, floating: the part of queries that is not rotated.
        query_rope: ``[tokens, num_heads, rope_dim]``, rotated.
        latent_cache: as of :func:`latent_attention`.
        rope_cache: see there.
        key_weight: ``[num_heads, nope_dim, rank]``, of query's dtype.
        value_weight: ``[num_heads, value_dim, rank]``, of query's dtype.
        block_table: as of :func:`paged_attention`, like the arguments that follow.
        query_start_loc, kv_lens, query_start_loc_host, kv_lens_host, options: see there.

    Returns:
        ``[tokens, num_heads, value_dim]``, of query's dtype.

    Source: DeepSeek-AI, *DeepSeek-V2*, 2024.
    """
    lengths = query_start_loc, kv_lens, query_start_loc_host, kv_lens_host
    absorbed = head_linear(query, key_weight)
    attended = latent_attention(absorbed, query_rope, latent_cache, rope_cache, block_table, *lengths, options)
    return head_linear(attended, value_weight.transpose(1, 2))
