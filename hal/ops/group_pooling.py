"""Pooling of groups of consecutive tokens, whose incomplete group a state per sequence holds between steps."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from hal.errors import OperationError
from hal.ops.declaration.constraints import Draw, Sample
from hal.ops.declaration.dtypes import FLOATING
from hal.ops.declaration.operation import op
from hal.ops.saved_states import SLOTS, last_tokens, slots_of_steps, write_states
from hal.ops.selection import places_of


def _samples(draw: Draw) -> Iterator[Sample]:
    for query_lens, kv_lens, dim, group, span, kind, saves in (
        ([1], [1], 16, 4, 1, "gate and bias", 0),
        ([5, 17, 1], [5, 17, 1], 32, 4, 1, "gate and bias", 0),  # prefill
        ([3, 18], [21, 47], 64, 16, 1, "gate and bias", 0),  # chunks that begin in a group
        ([1, 1, 1, 1], [32, 16, 7, 90], 128, 16, 1, "gate and bias", 0),  # decode
        ([1, 1, 1], [20, 0, 0], 24, 4, 1, "mean", 0),  # decode with padding rows
        ([9, 2, 0], [11, 24, 8], 40, 4, 1, "mean", 0),
        ([2, 7, 1], [2, 29, 8], 48, 4, 2, "gate and bias", 0),  # with the group before
        ([14, 3], [14, 131], 32, 3, 2, "gate", 0),
        ([0, 0], [5, 0], 16, 4, 1, "gate and bias", 0),  # no tokens
        ([3, 1], [9, 30], 32, 4, 1, "gate and bias", 3),  # the states after three tokens; the second sequence has one
        ([4, 4], [21, 6], 24, 3, 2, "gate", 4),
        ([11, 2], [11, 24], 40, 4, 1, "mean", 2),
    ):
        tokens, features = sum(query_lens), span * dim
        rows = draw.normal(tokens, 2 * features)
        gate = None if kind == "mean" else rows[:, features:]
        bias = draw.normal(group, features).float() if kind == "gate and bias" else None
        tail = draw.normal(SLOTS + len(query_lens), span * group, features if gate is None else 2 * features)
        read, write, starts, _ = slots_of_steps(draw, query_lens, saves, apart=kind != "mean")
        lens = draw.tensor(kv_lens, torch.int32)
        yield rows[:, :features], gate, bias, tail, read, write, starts, lens, group, span


@op(
    samples=_samples,
    axes={
        "x": "tokens features",
        "gate": "tokens features",
        "bias": "group features",
        "tail": "num_slots span*group stored",
        "return": "tokens features//span",
    },
    dtypes={
        "x": FLOATING,
        "gate": "x",
        "bias": (torch.float32, "x"),
        "tail": "x",
        "return": "x",
    },
    rowwise=None,
    state=("tail",),
    mutates=("tail",),
)
def pool_groups(
    x: Tensor,
    gate: Tensor | None,
    bias: Tensor | None,
    tail: Tensor,
    read_slots: Tensor,
    write_slots: Tensor | None,
    query_start_loc: Tensor,
    kv_lens: Tensor,
    group: int,
    span: int = 1,
) -> Tensor:
    """Pool each group of ``group`` consecutive tokens of a sequence into one row, when its last token arrives.

    Groups begin at the multiples of ``group``. The pooled row is, for each channel, the sum of the tokens' rows,
    weighted by the softmax of ``gate + bias`` over them; without a gate, their mean. Computed in float32, and rounded
    once. A result does not depend on how steps divide a sequence.

    With a ``span`` of 2, a pooled row reads the group before, too: a token's features are two halves, of which the
    first is for the group after its own, and the second for its own. The first group of a sequence reads only itself.

    Args:
        x: ``[tokens, features]``, floating, with ``features = span * dim``.
        gate: the logits of the weights, of x's shape and dtype; None for the mean.
        bias: ``[group, features]``, float32 or of x's dtype: what is added to the logits at each place of a group; None
            for nothing.
        tail: ``[num_slots, span * group, stored]``, of x's dtype, written in place: the last rows of each sequence, the
            row of position ``p`` at ``p % (span * group)``. A row is that of ``x``, followed by that of ``gate``.
        read_slots: ``[sequences]``, int32: the slot of each sequence's tail.
        write_slots: ``[sequences, saves]``, int32: slots of the tails after each of the last ``saves`` tokens, as of
            :func:`causal_conv1d`; None for the slot that was read, after the last token.
        query_start_loc: ``[sequences + 1]``, int32, ascending from 0.
        kv_lens: ``[sequences]``, int32, in tokens, including the new ones.
        group: the tokens of a group, 1 or more.
        span: the number of groups that a pooled row reads, 1 or more.

    Returns:
        ``[tokens, dim]``, of x's dtype: the pooled row of the group that a token completes, and 0 for tokens that
        complete none.

    Raises:
        OperationError: there is a bias without a gate, or ``tail`` has rows of another size.

    Source: Z.ai, the published code of GLM-5.3-Flash, 2026; with a span of 2, DeepSeek-AI, *DeepSeek-V4*, 2026.
    """
    rows = x if gate is None else torch.cat((x, gate), -1)
    if tail.shape[-1] != rows.shape[-1] or (gate is None and bias is not None):
        raise OperationError(
            f"pool_groups has rows of {rows.shape[-1]} features {'without' if gate is None else 'with'} a gate, "
            f"{'no' if bias is None else 'a'} bias, and a tail with rows of {tail.shape[-1]}",
            "pass a bias only with a gate, and a tail with the features of x, and of the gate if there is one",
        )
    (tokens, features), width = x.shape, span * group
    starts = query_start_loc.long()
    rows = functional.pad(rows, (0, 0, 0, 1))  # with a token of no sequence, so that there is one
    sequence, position = places_of(tokens + 1, query_start_loc, kv_lens)
    token = torch.arange(tokens + 1, device=x.device)

    # The tokens that complete a group, in front: sequence i has at most 1 + tokens of i // group of them.
    completes = (position >= 0) & ((position + 1) % group == 0)
    number = completes.long().cumsum(0) - 1
    count = tokens // group + read_slots.shape[0]
    last = starts.new_zeros(count + 1).scatter(0, torch.where(completes, number, count), token)[:count]
    back = torch.arange(1 - width, 1, device=x.device)
    new, place, owner = last[:, None] + back, position[last][:, None] + back, sequence[last][:, None]
    kept = tail[read_slots.long()[owner], place % width]
    read = torch.where((new >= starts[owner]).unsqueeze(-1), rows[new.clamp(min=0)], kept).float()

    def series(read: Tensor) -> Tensor:
        """Return the part of each token's features that its group is read for: ``[groups, span * group, dim]``."""
        parts = read.unflatten(-1, (span, -1)).unflatten(1, (span, group))
        return torch.cat([parts[:, each, :, each] for each in range(span)], 1)

    before = (place < 0).unsqueeze(-1)  # the beginning of the sequence
    values = series(read[..., :features]).masked_fill(before, 0.0)
    if gate is None:
        pooled = values.sum(1) / (~before).sum(1)
    else:
        logits = read[..., features:]
        if bias is not None:
            logits = logits + bias.float().repeat(span, 1)
        pooled = (series(logits).masked_fill(before, float("-inf")).softmax(1) * values).sum(1)
    result = pooled[number.clamp(min=0)].masked_fill(~completes.unsqueeze(-1), 0.0)

    if write_slots is not None:
        token, has = last_tokens(query_start_loc, write_slots.shape[1])  # [sequences, saves]
        position = kv_lens.long()[:, None] - starts[1:, None] + token
        token = token[..., None] - (position[..., None] - torch.arange(width, device=x.device)) % width
        kept = tail[read_slots.long()][:, None]
        after = torch.where((token >= starts[:-1, None, None]).unsqueeze(-1), rows[token.clamp(min=0)], kept)
        write_states(tail, write_slots, after, has & (kv_lens[:, None] > 0))
        return result[:tokens].to(x.dtype)

    # Of the tokens that share a place of the tail, all write the row of the last one. Those of no sequence write what
    # the last token of all does, or what is there if that is padding.
    writes = torch.where(position >= 0, token, starts[-1] - 1).clamp(min=0)
    owner = sequence[writes]
    source = writes + (starts[owner + 1] - 1 - writes).clamp(min=0) // width * width
    at = read_slots.long()[owner], position[writes] % width
    tail[at] = torch.where((position[writes] >= 0).unsqueeze(-1), rows[source], tail[at])
    return result[:tokens].to(x.dtype)
