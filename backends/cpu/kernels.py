"""CPU kernels that are faster than the references, in addition to those in hal.ops.kernels.torch_kernels.

All except silu_and_mul and gelu_and_mul round as their operations declare.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from hal import ops
from hal.errors import OperationError
from hal.ops import AttentionOptions
from hal.ops.kernels.composed_attention import joining, one_by_one, widening

MASKED_QUERIES = 256
"""Maximum number of queries under one attention mask."""


def rotary_embedding(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """See :func:`hal.ops.rotary_embedding`. It rotates the two halves without a copy, and widens cos and sin once."""
    if interleaved or cos.shape[-1] != query.shape[-1]:
        rotated: tuple[Tensor, Tensor] = ops.operation("rotary_embedding").reference(query, key, cos, sin, interleaved)
        return rotated
    half = cos.shape[-1] // 2
    cos, sin = cos[:, None, :half].float(), sin[:, None, :half].float()
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def silu_and_mul(x: Tensor) -> Tensor:
    """See :func:`hal.ops.silu_and_mul`. It rounds the gate once more than the reference, within the tolerance."""
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def gelu_and_mul(x: Tensor, approximate: str) -> Tensor:
    """See :func:`hal.ops.gelu_and_mul`. It rounds the gate once more than the reference, within the tolerance."""
    gate, up = x.chunk(2, dim=-1)
    return functional.gelu(gate, approximate=approximate).mul_(up)


def greedy_sample(logits: Tensor) -> Tensor:
    """See :func:`hal.ops.greedy_sample`. Here, ``max`` is several times faster than ``argmax``, of the same result."""
    return logits.max(-1).indices


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
    """See :func:`hal.ops.paged_attention`. It runs torch's flash attention, one sequence at a time.

    It reads the cache in place if a sequence's blocks are contiguous. Flash attention turns NaN, and rows of only -inf,
    into 0, which would hide a broken model; the reference runs in this case. Softcaps, sinks, chunks and position
    biases are composed of smaller operations.
    """
    cache = key_cache, value_cache, block_table
    on_device, on_host = (query_start_loc, kv_lens), (query_start_loc_host, kv_lens_host)
    reference = partial(ops.operation("paged_attention").reference, query, *cache, *on_device, *on_host, sinks, options)
    starts, lengths = query_start_loc_host.tolist(), kv_lens_host.tolist()
    num_blocks, block_size = key_cache.shape[:2]
    inside = bool(((block_table >= 0) & (block_table < num_blocks)).all())
    if not inside or max(lengths, default=0) > block_table.shape[1] * block_size or min(lengths, default=0) < 0:
        _refuse_outside(block_table, lengths, num_blocks, block_size)
    if sinks is not None or any(each is not None for each in (options.softcap, options.chunk, options.alibi)):
        return one_by_one(query, key_cache, value_cache, block_table, starts, lengths, sinks, options)
    output = torch.zeros_like(query, memory_format=torch.contiguous_format)
    broken = bool(lengths) and not _finite(query)
    for row, length in enumerate(lengths):
        start, end = starts[row], starts[row + 1]
        if length == 0 or start == end:
            continue
        blocks = block_table[row, : -(-length // block_size)]
        keys, values = _gather(key_cache, blocks, length), _gather(value_cache, blocks, length)
        first = end - start > 1 or length == 1  # the first step checks the keys for all later steps
        if broken or (first and not _finite(keys[start - end :])):
            return reference()  # type: ignore[no-any-return]
        by_queries = _decode if end - start == 1 and options.causal else _prefill
        output[start:end] = by_queries(query[start:end], keys, values, options)
    return output


latent_attention = joining(paged_attention)
quantized_paged_attention = widening(paged_attention)


def _finite(x: Tensor) -> bool:
    """Return whether all elements are finite, faster than ``x.isfinite().all()``. The extremes of NaN are NaN."""
    return x.numel() == 0 or bool(torch.stack(x.aminmax()).isfinite().all())


def _refuse_outside(block_table: Tensor, lengths: list[int], num_blocks: int, block_size: int) -> None:
    """Raise OperationError for a sequence outside the cache, which slicing would silently truncate."""
    for row, (blocks, length) in enumerate(zip(block_table.tolist(), lengths, strict=True)):
        used = blocks[: -(-length // block_size)]
        if not 0 <= length <= len(used) * block_size or not all(0 <= block < num_blocks for block in used):
            raise OperationError(
                f"paged_attention: sequence {row} has {length} tokens in the blocks {blocks} of a cache of "
                f"{num_blocks} blocks of {block_size}",
                "check the batch's block_table and lengths",
            )


def _gather(cache: Tensor, blocks: Tensor, length: int) -> Tensor:
    """Return a sequence's rows ``[length, num_kv_heads, head_dim]``: a view if its blocks are contiguous, or a copy."""
    first, count = int(blocks[0]), blocks.shape[0]
    if int(blocks[-1]) - first == count - 1 and (count <= 2 or bool((blocks.diff() == 1).all())):
        return cache[first : first + count].flatten(0, 1)[:length]
    return cache[blocks.long()].flatten(0, 1)[:length]


def _decode(query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
    """Attend with one query. The query heads that share a key head become rows of one product."""
    if options.window is not None:
        first = max(0, keys.shape[0] - options.window)
        keys, values = keys[first:], values[first:]
    kv_heads, head_dim = keys.shape[1:]
    grouped = query.reshape(1, kv_heads, -1, head_dim)
    attended = functional.scaled_dot_product_attention(
        grouped, keys.transpose(0, 1)[None], values.transpose(0, 1)[None], scale=options.scale
    )
    return attended.reshape(1, -1, head_dim)


def _prefill(query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
    scale, causal, window = options.scale, options.causal, options.window
    tokens, length = query.shape[0], keys.shape[0]
    if window is None and (not causal or tokens == length):
        return _attend(query, keys, values, scale, causal=causal)
    # In pieces, because torch widens the mask to float32: for a long prompt it would be the largest tensor.
    pieces = []
    for start in range(0, tokens, MASKED_QUERIES):
        piece = query[start : start + MASKED_QUERIES]
        position = length - tokens + start
        after = 1 if causal else window or length
        end = min(length, position + piece.shape[0] - 1 + after)
        first = 0 if window is None else max(0, position - window + 1)
        mask = _mask(piece.shape[0], position, first, end, causal, window)
        pieces.append(_attend(piece, keys[first:end], values[first:end], scale, mask=mask))
    return torch.cat(pieces)


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, *, causal: bool = False, mask: Tensor | None = None
) -> Tensor:
    attended = functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=True,
    )
    return attended[0].transpose(0, 1)


def _mask(tokens: int, position: int, first: int, end: int, causal: bool, window: int | None) -> Tensor:
    """Return the mask of ``tokens`` queries, the first at ``position``, over the slots from ``first`` to ``end``."""
    at, slot = torch.arange(position, position + tokens)[:, None], torch.arange(first, end)
    mask = slot <= at if causal else torch.ones(tokens, end - first, dtype=torch.bool)
    return mask if window is None else mask & (slot > at - window) & (slot < at + window)


def int8_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x @ weight.T`` in int32, from oneDNN, which is many times faster than an int32 product.

    torch's product picks the wrong stride if both strides of a matrix are 1, as for a width of 1.
    """
    out_features, width = weight.shape
    if width == 1:
        return x.int() * weight.int().t()
    rows = x.flatten().view(-1, width)  # has the strides of its shape, which .contiguous() does not guarantee
    return torch._int_mm(rows, weight.t()).view(*x.shape[:-1], out_features)


EXACT = 1 << 10
"""Products of int8 numbers that float32 sums exactly."""


def int8_product_in_float32(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x @ weight.T`` in int32, from products in float32, for processors that do not multiply integers.

    torch multiplies matrices of int32 without any library, some hundred times as long.
    """
    sums = torch.zeros(*x.shape[:-1], weight.shape[0], dtype=torch.int32)
    for start in range(0, x.shape[-1], EXACT):
        part = slice(start, start + EXACT)
        sums += functional.linear(x[..., part].float(), weight[:, part].float()).int()
    return sums
