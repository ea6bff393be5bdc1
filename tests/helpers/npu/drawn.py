"""Random arguments of attention for the hardware: blocks of 128 tokens, all kinds of batches."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import torch

from hal.ops import AttentionOptions, Draw, Sample

HEAD_DIMS = (16, 32, 64, 80, 96, 128, 128, 192, 256)
KINDS = ("decode", "padded decode", "prefill", "prefix", "mixed", "alike", "left over", "uneven")


def attention_arguments(
    draw: Draw,
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 128,
    block_size: int = 128,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    with_sinks: bool = False,
    left_over: int = 0,
    unused: float = math.nan,
) -> Sample:
    """Return arguments for query_lens[i] new tokens of kv_lens[i] in sequence i, and ``left_over`` padding tokens.

    Blocks are in random order, table entries beyond a length are block 0, and unreadable slots hold ``unused``.
    """
    needed = [math.ceil(length / block_size) for length in kv_lens]
    order = (1 + draw.permutation(sum(needed)).cpu()).tolist()
    table = torch.zeros(len(kv_lens), max(needed, default=0) + 1, dtype=torch.int32)
    caches = [draw.normal(1 + sum(needed), block_size, kv_heads, head_dim).cpu() for _ in range(2)]
    kept = torch.zeros(caches[0].shape[:2], dtype=torch.bool)
    for row, count in enumerate(needed):
        blocks = [order.pop() for _ in range(count)]
        table[row, :count] = torch.tensor(blocks, dtype=torch.int32)
        for place, block in enumerate(blocks):
            kept[block, : kv_lens[row] - place * block_size] = True
    for cache in caches:
        cache[~kept] = unused
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    lens = torch.tensor(kv_lens, dtype=torch.int32)
    device = draw.device
    return (
        draw.normal(sum(query_lens) + left_over, heads, head_dim),
        *(cache.to(device) for cache in caches),
        table.to(device),
        starts.to(device),
        lens.to(device),
        starts,
        lens,
        draw.normal(heads) if with_sinks else None,
        AttentionOptions(head_dim**-0.5, window=window, causal=causal, softcap=softcap),
    )


def drawn_attention(seed: int, dtype: torch.dtype, **fixed: Any) -> Sample:
    """Draw arguments of the kind that the seed selects, the rest at random; ``fixed`` overrides any."""
    choose, kind = random.Random(seed), KINDS[seed % len(KINDS)]
    count = choose.randint(1, 9)
    cached = [choose.choice((0, 1, 100, 127, 128, 129, 255, 256, 300)) for _ in range(count)]
    if "decode" in kind:
        new = [1] * count
    elif kind == "alike":
        new = [choose.randint(2, 20)] * count
    else:
        count, cached = (count + 1) // 2, cached[: (count + 1) // 2]
        new = [choose.choice((1, 2, 17, 40, 130)) for _ in range(count)]
    if kind == "prefill":
        cached = [0] * count
    if kind == "mixed":
        new = [choose.choice((1, 1, 1, 30)) for _ in new]
    if kind == "uneven":  # one query per sequence only on average
        new = [*([2, 0] * choose.randint(1, 2)), *([1] * choose.randint(0, 2))]
        cached = [choose.randint(0, 200) for _ in new]
    lengths = [before + length for before, length in zip(cached, new, strict=True)]
    if kind == "padded decode":
        padding = choose.randint(1, 5)
        new, lengths = new + [1] * padding, lengths + [0] * padding
    longest = max(lengths)
    window = choose.choice((None, None, 1, 60, 128, 129, max(1, longest - 1), longest, longest + 7))
    kv_heads = choose.choice((1, 2))
    given = {
        "heads": kv_heads * choose.choice((1, 2, 3, 4, 7, 8)),
        "kv_heads": kv_heads,
        "head_dim": choose.choice(HEAD_DIMS),
        "causal": choose.random() < 0.8,
        "window": window,
        "left_over": 3 if kind == "left over" else 0,
        "with_sinks": choose.random() < 0.3,
    }
    return attention_arguments(Draw(dtype, "npu", seed), new, lengths, **(given | fixed))
