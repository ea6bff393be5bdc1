"""The rows of hidden states that a step computes logits for."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Final

import attrs
import numpy as np
import torch
from torch import Tensor

from hal.device.device import to_device
from hal.errors import BatchError
from hal.step.batch import Batch
from hal.step.batch_inputs import int64_of
from hal.step.shape import StepShape


class Rows(Enum):
    """The tokens of a step that have logits, where no tensor names them.

    Attributes:
        LAST: the last new token of each sequence.
        ALL: all tokens.
        NONE: no token. The output projection does not run.
    """

    LAST = "last"
    ALL = "all"
    NONE = "none"


LAST: Final = Rows.LAST
ALL: Final = Rows.ALL
NONE: Final = Rows.NONE

Wanted = Rows | Tensor
"""``LAST``, ``ALL``, ``NONE``, or the tokens in any order: ``[rows]``, of integers, counted from the batch's first."""


def check_rows(rows: Any, batch: Batch) -> Wanted:
    """Return the rows, on the batch's device.

    Values on a device are not checked, since the host would wait for the device in each step.

    Raises:
        BatchError: they are no rows, or a token is out of range.
    """
    if isinstance(rows, Rows):
        return rows
    if not isinstance(rows, Tensor) or rows.dim() != 1 or rows.dtype not in (torch.int64, torch.int32):
        what = f"{rows.dtype} of {list(rows.shape)}" if isinstance(rows, Tensor) else f"{rows!r:.70}"
        raise BatchError(f"rows is {what}", "pass hal.step.LAST, ALL or NONE, or the tokens as int64 [rows]")
    if not rows.shape[0]:
        return NONE
    if rows.is_cpu:
        tokens, indices = batch.num_tokens, rows.tolist()  # a list is faster than a small tensor
        if not (min(indices) >= 0 and max(indices) < tokens):
            wrong = next(each for each in indices if not 0 <= each < tokens)
            raise BatchError(
                f"rows has {wrong}, out of the range 0 to {tokens - 1}",
                "count tokens from the batch's first; negative numbers would select padding",
            )
    return to_device(rows, batch.token_ids.device) if rows.is_cpu else rows


def last_rows(num_tokens: Sequence[int], num_logits: Sequence[int]) -> Wanted:
    """Return the rows of the last new tokens of each sequence.

    Args:
        num_tokens: the number of new tokens of each sequence.
        num_logits: how many of these have logits, such as 0 in the middle of a prompt.

    Raises:
        BatchError: there are not as many numbers, or a sequence has fewer tokens.
    """
    counts, asked = int64_of("num_tokens", num_tokens), int64_of("num_logits", num_logits)
    if len(counts) != len(asked):
        raise BatchError(
            f"num_tokens has {len(counts)} numbers, and num_logits {len(asked)}", "pass one for each sequence"
        )
    wrong = (asked < 0) | (asked > counts)
    if wrong.any():
        row = int(wrong.argmax())
        raise BatchError(
            f"{asked[row]} logits are asked of the {counts[row]} new tokens of sequence {row}",
            "ask for 0 up to all new tokens",
        )
    if (asked == 1).all():
        return LAST
    if not asked.any():
        return NONE
    if (asked == counts).all():
        return ALL
    ends = counts.cumsum()
    behind = asked.cumsum()
    return torch.from_numpy(np.arange(behind[-1]) - (behind - ends).repeat(asked))


def taken(values: Tensor, rows: Wanted, batch: Batch, shape: StepShape) -> Tensor:
    """Return the wanted rows of ``values``, which has a row for each token of the batch.

    Nothing is copied where the shape of the step says where the rows are.

    Args:
        values: ``[tokens, ...]``.
        rows: the rows.
        batch: its starts say which tokens are the last.
        shape: its shape.
    """
    if rows is ALL:
        return values
    if rows is NONE:
        return values[:0]
    if isinstance(rows, Tensor):
        return values.index_select(0, rows)
    if shape.queries == 1:
        return values
    if shape.queries:
        return values[shape.queries - 1 :: shape.queries]
    if shape.sequences == 1:
        return values[-1:]
    return values.index_select(0, batch.query_start_loc[1:] - 1)


@attrs.frozen(eq=False)
class SplitBatch:
    """A batch in several steps; :func:`split_batch` makes it.

    Attributes:
        steps: the batches to run, in order, and the rows of each.
    """

    steps: tuple[tuple[Batch, Wanted], ...]
    _order: Tensor | None

    def join(self, logits: Sequence[Tensor]) -> Tensor:
        """Return the logits of the whole batch, in the order of its rows.

        Args:
            logits: those of each step whose rows are not ``NONE``, in order. Copy them: a step overwrites the last.
        """
        joined = torch.cat(tuple(logits))
        return joined if self._order is None else joined.index_select(0, self._order.to(joined.device))


def split_batch(batch: Batch, rows: Wanted, max_tokens: int) -> SplitBatch:
    """Split a batch into steps of at most ``max_tokens`` tokens, as :meth:`Batch.split` does, and its rows with it.

    Raises:
        BatchError: ``max_tokens`` is not an integer of 1 or more, or a row is out of range.
    """
    parts, rows = batch.split(max_tokens), check_rows(rows, batch)
    if rows is ALL or rows is NONE:
        return SplitBatch(tuple((part, rows) for part in parts), None)
    wanted = rows.cpu() if isinstance(rows, Tensor) else batch.query_start_loc_host[1:].long() - 1
    steps: list[tuple[Batch, Wanted]] = []
    places: list[Tensor] = []
    start = 0
    for part in parts:
        here = ((wanted >= start) & (wanted < start + part.num_tokens)).nonzero().flatten()
        places.append(here)
        device = batch.token_ids.device
        steps.append((part, to_device(wanted[here] - start, device) if here.shape[0] else NONE))
        start += part.num_tokens
    order = torch.cat(places).argsort()
    return SplitBatch(tuple(steps), None if bool((order.diff() > 0).all()) else order)
