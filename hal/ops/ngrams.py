"""Numbers of n-grams: what the last tokens of a sequence look up in tables of embeddings."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from hal.errors import OperationError
from hal.ops.declaration.constraints import Draw, Sample
from hal.ops.declaration.operation import op
from hal.ops.saved_states import SLOTS, last_tokens, slots_of_steps, write_states, written_slots
from hal.ops.selection import places_of

VOCABULARY = 50
"""The tokens of the samples."""


def _samples(draw: Draw) -> Iterator[Sample]:
    for query_lens, kv_lens, longest, heads, saves in (
        ([1], [1], 3, 8, 0),
        ([5, 17, 1], [5, 17, 1], 3, 2, 0),  # prefill
        ([3, 16], [4, 48], 4, 2, 0),  # chunks, one of which begins at the second token
        ([1, 1, 1, 1], [2, 16, 3, 90], 3, 4, 0),  # decode
        ([1, 1, 1], [20, 0, 0], 2, 1, 0),  # decode with padding rows
        ([0, 2], [7, 2], 5, 3, 0),
        ([0, 0], [7, 2], 3, 2, 0),
        ([3, 1], [9, 4], 4, 2, 3),  # the states after three tokens; the second sequence has one
        ([2, 2, 5], [2, 9, 30], 3, 2, 2),
    ):
        tables = (longest - 1) * heads
        token_ids = draw.integers(0, VOCABULARY, sum(query_lens)).long()
        window = draw.integers(0, VOCABULARY, SLOTS + heads, longest - 1).long()
        multipliers = 2 * draw.integers(0, (1 << 31) - 1, longest).long() * 40_000_000 + 1
        sizes = 100 + draw.integers(0, 100, tables).long()
        read, write, starts, _ = slots_of_steps(draw, query_lens, saves)
        hashing, lens = (multipliers, sizes, sizes.cumsum(0) - sizes), draw.tensor(kv_lens, torch.int32)
        yield token_ids, window, *hashing, read, write, starts, lens, 7
        # With few tokens, many of them end the text.
        yield token_ids % 3, window % 3, *hashing, read, write, starts, lens, 2


@op(
    samples=_samples,
    axes={
        "token_ids": "tokens",
        "window": "num_slots longest-1",
        "multipliers": "longest",
        "sizes": "tables",
        "first_rows": "tables",
        "return": "tokens tables",
    },
    dtypes={
        **dict.fromkeys(("token_ids", "window", "multipliers", "sizes", "first_rows", "return"), torch.int64),
    },
    rowwise=None,
    state=("window",),
    mutates=("window",),
)
def hash_ngrams(
    token_ids: Tensor,
    window: Tensor,
    multipliers: Tensor,
    sizes: Tensor,
    first_rows: Tensor,
    read_slots: Tensor,
    write_slots: Tensor | None,
    query_start_loc: Tensor,
    kv_lens: Tensor,
    end: int,
) -> Tensor:
    """Return the rows that the n-grams that end with each token have in tables of embeddings, which are hashed.

    An n-gram is a token with the ones before it in its sequence. Texts are apart: from the last ``end`` before the
    token on, and from the start of the sequence on, ``end`` stands for all earlier tokens. The number of an n-gram is
    the exclusive or of ``multipliers[i] * token``, with the token ``i`` places back, in int64. The row is the number
    modulo the size of a table, plus the table's first row. Each n, from 2 on, has the same number of tables, in order.

    Args:
        token_ids: ``[tokens]``, int64.
        window: ``[num_slots, longest - 1]``, int64, written in place: the last tokens of each sequence.
        multipliers: ``[longest]``, int64: one for each token of the longest n-gram. Products with tokens fit int64.
        sizes: ``[tables]``, int64: the rows of each table, 1 or more.
        first_rows: ``[tables]``, int64.
        read_slots: ``[sequences]``, int32: the slot of each sequence's window.
        write_slots: ``[sequences, saves]``, int32: slots of the windows after each of the last ``saves`` tokens, as of
            :func:`causal_conv1d`; None for the slot that was read, after the last token.
        query_start_loc: ``[sequences + 1]``, int32, ascending from 0.
        kv_lens: ``[sequences]``, int32, in tokens, including the new ones.
        end: the token that ends a text.

    Returns:
        ``[tokens, tables]``, int64: rows of the tables, also for tokens of no sequence.

    Raises:
        OperationError: the numbers n do not share the tables equally.

    Source: Qwen Team, the published code of Qwen3.8-Flash-Next, 2026.
    """
    kept, tables = window.shape[1], sizes.shape[0]
    if kept < 1 or tables % kept:
        raise OperationError(
            f"hash_ngrams has {tables} tables for {kept} numbers of tokens of an n-gram",
            "give each number, from 2 on, the same number of tables",
        )
    starts, before = query_start_loc.long(), window[read_slots.long()]  # [sequences, kept]
    new = functional.pad(token_ids, (0, 1))  # with one that is never read, so that there is one
    sequence, position = places_of(token_ids.shape[0], query_start_loc, kv_lens)
    token = torch.arange(token_ids.shape[0], device=token_ids.device)

    def back(token: Tensor, sequence: Tensor, count: int) -> Tensor:
        """Return the tokens that are ``count`` places before the given ones of sequences."""
        place = token - count - starts[sequence]
        old = before[sequence, (place + kept).clamp(0, kept - 1)]
        return torch.where(place >= 0, new[(token - count).clamp(min=0)], old)

    numbers, mixed = list[Tensor](), token_ids * multipliers[0]
    apart = torch.zeros_like(token, dtype=torch.bool)
    for count in range(1, kept + 1):
        earlier = back(token, sequence, count)
        apart = apart | (position < count) | (earlier == end)
        mixed = mixed ^ (torch.where(apart, end, earlier) * multipliers[count])
        numbers.append(mixed)
    by_length = torch.stack(numbers, 1).repeat_interleave(tables // kept, 1)
    rows = by_length.remainder(sizes) + first_rows

    columns = written_slots(read_slots, write_slots)
    last, has = last_tokens(query_start_loc, columns.shape[1])
    owner = torch.arange(last.shape[0], device=last.device)[:, None].expand_as(last)
    after = torch.stack([back(last, owner, count) for count in range(kept - 1, -1, -1)], 2)
    write_states(window, columns, after, has)
    return rows
