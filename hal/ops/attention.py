"""Attention over the paged KV cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from hal.errors import OperationError
from hal.ops.declaration.constraints import Draw, Sample
from hal.ops.declaration.dtypes import FLOATING
from hal.ops.declaration.operation import op


@attrs.frozen
class AttentionOptions:
    """The options of attention, which a layer, the operation and its kernels pass on as one object.

    A score is ``query @ key * scale``; with a softcap, it becomes ``softcap * tanh(score / softcap)``. The biases of
    ``alibi`` are added then, and the mask of ``causal``, ``window`` and ``chunk`` comes last.

    Attributes:
        scale: the factor of the scores.
        window: the number of tokens, 1 or more, that a query attends to, ending with its own, and without ``causal``
            also from its own on; None for all.
        softcap: the bound of the scores, more than 0; None for none. Source: Gemma Team, *Gemma 2*, 2024.
        causal: whether a query attends only to tokens up to its own.
        chunk: the number of tokens of a chunk, 1 or more; a query attends only to tokens of its own chunk. Chunks are
            counted from a sequence's first token. None for no chunks. Source: Meta, *Llama 4*, 2025.
        alibi: the factor of the biases, more than 0, or None for no biases. The score of a key gets ``alibi * slope *
            (position of the key - position of the query)``, with the slopes of that source:
            Press et al., *Train Short, Test Long*, 2021.

    Raises:
        OperationError: the window, the chunk or the softcap excludes every score, or the factor is not more than 0.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    causal: bool = True
    chunk: int | None = None
    alibi: float | None = None

    def __attrs_post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise OperationError(
                f"attention has the window {self.window}, which excludes the query's own token",
                "set window to 1 or more, or to None for no window",
            )
        if self.softcap is not None and not self.softcap > 0:
            raise OperationError(
                f"attention has the softcap {self.softcap}, which no score can have",
                "set softcap to more than 0, or to None for none",
            )
        if self.chunk is not None and self.chunk < 1:
            raise OperationError(
                f"attention has chunks of {self.chunk} tokens, which exclude the query's own token",
                "set chunk to 1 or more, or to None for no chunks",
            )
        if self.alibi is not None and not self.alibi > 0:
            raise OperationError(
                f"attention has the factor {self.alibi} of position biases, which favors distant tokens",
                "set alibi to more than 0, or to None for no biases",
            )


def alibi_slopes(num_heads: int, device: torch.device) -> Tensor:
    """Return the slopes of ALiBi ``[num_heads]``, float32: powers of ``2 ** (-8 / p)``, where ``p`` is a power of 2.

    With as many heads as ``p``, they are the powers from 1 to ``p``. With fewer, ``p`` is the next power of 2, and the
    slopes are the even powers and then the odd ones. Source: Press et al., *Train Short, Test Long*, 2021.
    """
    head, whole = torch.arange(num_heads, device=device), 1 << (num_heads - 1).bit_length()
    power = head + 1
    if whole != num_heads:
        power = torch.where(head < whole // 2, 2 * head + 2, 2 * head + 1 - whole)
    return torch.exp2(power * (-8.0 / whole))


def attention_sample(
    draw: Draw,
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    scale: float | None = None,
    sinks: bool = False,
    blocks: Sequence[int] | None = None,
    num_blocks: int | None = None,
    **options: Any,
) -> Sample:
    """Return the arguments of a call with these numbers of queries and lengths."""
    widest = max(-(-length // block_size) for length in kv_lens) + 1
    num_blocks = num_blocks or widest * len(kv_lens) + 1
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    lens = torch.tensor(kv_lens, dtype=torch.int32)
    table = draw.permutation(num_blocks)[: widest * len(kv_lens)]
    if blocks is not None:
        table = draw.tensor(blocks, torch.int32)
    cache_shape = (num_blocks, block_size, kv_heads, head_dim)
    return (
        draw.normal(sum(query_lens), heads, head_dim),
        draw.normal(*cache_shape),
        draw.normal(*cache_shape),
        table.view(len(kv_lens), widest),
        starts.to(draw.device),
        lens.to(draw.device),
        starts,
        lens,
        draw.normal(heads) if sinks else None,
        AttentionOptions(head_dim**-0.5 if scale is None else scale, **options),
    )


def _paged_attention_samples(draw: Draw) -> Iterator[Sample]:
    yield attention_sample(draw, [1], [1])
    yield attention_sample(draw, [5, 17, 1], [5, 17, 1])  # prefill
    yield attention_sample(draw, [3, 16], [21, 48], kv_heads=1)  # prefill after a cached prefix
    yield attention_sample(draw, [1, 1, 1, 1], [33, 16, 1, 15], head_dim=128)  # decode
    yield attention_sample(draw, [1, 1, 1], [20, 0, 0])  # decode with padding rows
    yield attention_sample(draw, [9, 1], [30, 40], heads=2, window=7)
    yield attention_sample(draw, [1, 1], [30, 40], window=16)
    yield attention_sample(draw, [4, 6], [4, 9], causal=False, block_size=32)
    yield attention_sample(draw, [9, 4], [9, 14], causal=False, window=3)
    yield attention_sample(draw, [7, 1], [7, 30], scale=0.5)
    yield attention_sample(draw, [1, 2], [60, 60], blocks=[3, 5, 4, 6, 0, 10, 7, 8, 9, 1])  # almost in order
    yield attention_sample(draw, [4, 1], [4, 33], softcap=2.0)
    yield attention_sample(draw, [1, 1, 1], [33, 0, 7], sinks=True)
    yield attention_sample(draw, [9, 1, 5], [30, 40, 5], heads=6, head_dim=128, sinks=True)
    yield attention_sample(draw, [1, 1], [30, 40], sinks=True, window=16)
    yield attention_sample(draw, [6, 2], [30, 2], sinks=True, window=7, softcap=1.5, scale=0.5)
    yield attention_sample(draw, [4, 6], [4, 9], sinks=True, softcap=30.0, causal=False, block_size=32)
    for new in ([5, 1], [1, 1]):  # A sequence is longer than the cache: blocks before its window are others'.
        table = [3, 3, 3, 1, 2, 0, 3, 0, 0, 0, 0, 0]
        yield attention_sample(draw, new, [70, 20], window=16, blocks=table, num_blocks=4)
    yield attention_sample(draw, [9, 1, 17], [30, 40, 17], chunk=8)
    yield attention_sample(draw, [1, 1, 1], [33, 0, 7], heads=6, chunk=7)
    yield attention_sample(draw, [9, 1, 5], [30, 40, 5], heads=6, alibi=1.0)
    yield attention_sample(draw, [1, 1, 1], [33, 0, 7], alibi=0.25, sinks=True, window=16)


@op(
    samples=_paged_attention_samples,
    axes={
        "query": "tokens num_heads head_dim",
        "key_cache": "num_blocks block_size num_kv_heads head_dim",
        "value_cache": "num_blocks block_size num_kv_heads head_dim",
        "sinks": "num_heads",
        "return": "tokens num_heads head_dim",
    },
    dtypes={
        "query": FLOATING,
        "key_cache": "query",
        "value_cache": "query",
        "sinks": "query",
        "return": "query",
    },
    rowwise="tokens",
    state=("key_cache", "value_cache"),
    host=("query_start_loc_host", "kv_lens_host"),
)
def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    kv_lens: Tensor,
    query_start_loc_host: Tensor,
    kv_lens_host: Tensor,
    sinks: Tensor | None,
    options: AttentionOptions,
) -> Tensor:
    """Attend from each sequence's new tokens to all its tokens in the paged cache, for prefill and decode.

    Sequence ``i`` has the queries from ``query_start_loc[i]`` to ``query_start_loc[i + 1]``, the last of its
    ``kv_lens[i]`` tokens. Query heads share key heads in groups of ``num_heads / num_kv_heads``. Scores and softmax are
    computed in float32, and the result is rounded once. Queries of a sequence of length 0, or past the last sequence,
    return 0.

    Args:
        query: ``[tokens, num_heads, head_dim]``, floating.
        key_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]``, of query's dtype; includes the new keys.
        value_cache: as ``key_cache``.
        block_table: ``[sequences, blocks]``, int32; entries past a sequence's length, and before its window, must be
            valid too. With a window, a sequence may have more blocks than the cache.
        query_start_loc: ``[sequences + 1]``, int32, ascending from 0.
        kv_lens: ``[sequences]``, int32, in tokens, including the new ones.
        query_start_loc_host: a CPU copy of ``query_start_loc``.
        kv_lens_host: a CPU copy of ``kv_lens``.
        sinks: ``[num_heads]``, of query's dtype; a score for each head that joins the softmax and has no value, so that
            the weights add up to less than 1. None for none.
        options: scale, mask and softcap of the scores.

    Returns:
        ``[tokens, num_heads, head_dim]``, of query's dtype.

    Source: Kwon et al., *PagedAttention*, 2023; Ainslie et al., *GQA*, 2023; OpenAI, *gpt-oss*, 2025, for sinks.
    """
    blocks = block_table.long()
    return attend_to(query, key_cache[blocks], value_cache[blocks], query_start_loc, kv_lens, sinks, options)


def owners(tokens: int, query_start_loc: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers of the tokens of a step, and the sequence of each; past the last one, their number."""
    token = torch.arange(tokens, device=query_start_loc.device)
    return token, torch.searchsorted(query_start_loc[1:].long(), token, right=True)


def weights_of(scores: Tensor, visible: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax of visible scores, and 0 for others and in rows of no visible ones.

    Args:
        scores: ``[..., num_kv_heads, heads of a key head, queries, keys]``, float32.
        visible: bool, to which the scores' shape can be broadcast.
        sinks: as of :func:`paged_attention`.
    """
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        sink = sinks.float().view(scores.shape[-4], -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    return weights.masked_fill(~visible, 0.0)


def attend_to(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    query_start_loc: Tensor,
    kv_lens: Tensor,
    sinks: Tensor | None,
    options: AttentionOptions,
) -> Tensor:
    """Return the attention of :func:`paged_attention` to gathered blocks.

    Args:
        query: ``[tokens, num_heads, head_dim]``, as the arguments that are not described here.
        keys: ``[sequences, blocks, block_size, num_kv_heads, head_dim]``, of any floating dtype.
        values: as ``keys``.
    """
    tokens, num_heads, head_dim = query.shape
    sequences, max_blocks, block_size, kv_heads = keys.shape[:4]
    capacity = max_blocks * block_size

    # Compute the scores of all tokens and gathered keys, and mask those of other sequences.
    token, owner = owners(tokens, query_start_loc)
    owned = torch.clamp(owner, max=sequences - 1)
    length = kv_lens.long()[owned]
    position = length - query_start_loc.long()[owned + 1] + token

    slot = torch.arange(capacity, device=query.device)
    visible = slot < length[:, None]
    if options.causal:
        visible = visible & (slot <= position[:, None])
    if options.window is not None:
        visible = visible & (slot > position[:, None] - options.window) & (slot < position[:, None] + options.window)
    if options.chunk is not None:
        visible = visible & (slot // options.chunk == position[:, None] // options.chunk)
    same = owner[:, None, None] == torch.arange(sequences, device=query.device)[:, None]
    mask = (same & visible[:, None, :]).view(1, 1, tokens, sequences * capacity)

    # Unfilled slots may contain NaN, and 0 * NaN is NaN.
    filled = (slot < kv_lens[:, None]).view(-1, 1, 1)
    keys, values = (each.reshape(-1, kv_heads, head_dim).float().masked_fill(~filled, 0.0) for each in (keys, values))

    grouped = query.float().view(tokens, kv_heads, num_heads // kv_heads, head_dim).permute(1, 2, 0, 3)
    scores = grouped @ keys.permute(1, 2, 0).unsqueeze(1) * options.scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if options.alibi is not None:
        slopes = options.alibi * alibi_slopes(num_heads, query.device).view(kv_heads, -1, 1, 1)
        scores = scores + slopes * (slot - position[:, None]).repeat(1, sequences)
    result = weights_of(scores, mask, sinks) @ values.permute(1, 0, 2).unsqueeze(1)
    return result.permute(2, 0, 1, 3).reshape(tokens, num_heads, head_dim).to(query.dtype)
