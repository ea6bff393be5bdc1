"""The choice of next tokens from a step's logits, with what each request asks for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hal import ops
from hal.generation.logits_processing import PenaltyTable, add_biases, all_tokens, allowed_tokens, has_penalties
from hal.generation.request import Place, Request
from hal.generation.sampling_params import SamplingParams
from hal.ops.logits import WORD
from hal.step import to_device


def reads_text(request: Request) -> bool:
    """Return whether the choice of a token depends on the values of those before it, beside the logits."""
    return request.mask is not None or bool(request.bad) or has_penalties(request.params)


class Chooser:
    """Chooses the next tokens of running requests: their penalties, biases, masks, and their draws.

    Attributes:
        failed: the requests whose mask failed, with the exceptions. Whoever reads them empties the list.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.failed: list[tuple[Request, Exception]] = []
        self._vocab_size, self._device = vocab_size, device
        self._table: PenaltyTable | None = None

    def add(self, request: Request) -> None:
        """Prepare for the tokens of a request."""
        params = request.params
        bare = not reads_text(request) and request.inputs is None and params.logprobs is None
        request.plain = bare and not (params.logit_bias or params.min_new_tokens) and params.temperature == 0
        if self._table is None and has_penalties(params):
            self._table = PenaltyTable(self._vocab_size, self._device)

    def remove(self, request: Request) -> None:
        """Free what a request holds that has ended."""
        if self._table is not None and request.penalties is not None:
            self._table.remove(request.penalties)

    def choose(self, places: Sequence[Place], logits: Tensor) -> Tensor:
        """Return the token of each place, ``[places]``, int64, on the device of the logits ``[places, vocab_size]``.

        A mask that fails ends its request, and any token is returned for it.
        """
        allowed = self._allowed(places)
        table = self._table
        rows = [] if table is None else [self._penalties(table, each.request) for each in places]
        if table is not None and any(rows):
            logits = table.penalize(logits, rows, [each.drafted for each in places])
        logits = add_biases(logits, places)
        if allowed is not None:
            logits = ops.mask_logits(logits, to_device(allowed, logits.device))
        return choose(logits, [each.request.params for each in places], [each.drawn for each in places])

    def count(self, requests: Sequence[Request], tokens: Tensor) -> None:
        """Count new tokens ``[requests]`` of requests, which may occur more than once, for their penalties."""
        table = self._table
        if table is not None and any(rows := [self._penalties(table, each) for each in requests]):
            table.count(rows, tokens)

    def _allowed(self, places: Sequence[Place]) -> Tensor | None:
        """Return the masks of places, ``[places, words]``, or None if there are none. One that fails ends its request.

        Behind a drafted token that its mask does not allow, every token is: the draft will be dropped.
        """
        if all(each.request.mask is None for each in places):
            return None
        rows = [all_tokens(self._vocab_size)] * len(places)
        left: Request | None = None
        for row, place in enumerate(places):
            request, mask = place.request, place.request.mask
            if mask is None or request.ended or request is left:
                continue
            if place.drafted and not allows(rows[row - 1], place.drafted[-1]):
                left = request
                continue
            try:
                rows[row] = allowed_tokens(request.prompt_index, mask, place.generated, self._vocab_size)
            except Exception as error:
                request.cancelled = True
                self.failed.append((request, error))
        return torch.stack(rows)

    @staticmethod
    def _penalties(table: PenaltyTable, request: Request) -> int:
        if request.penalties is None:
            request.penalties = table.add(request.tokens, request.params)
        return request.penalties


def allows(mask: Tensor, token: int) -> bool:
    """Return whether a mask ``[words]`` of :func:`hal.ops.mask_logits` allows a token."""
    return bool(int(mask[token // WORD]) >> token % WORD & 1)


def choose(logits: Tensor, params: Sequence[SamplingParams], drawn: Sequence[int]) -> Tensor:
    """Return the next token of each row.

    Args:
        logits: ``[batch, vocab_size]``, floating, free of NaN.
        params: one for each row.
        drawn: the number of tokens drawn for each row's prompt so far, which is the position in its random sequence.

    Returns:
        ``[batch]``, int64, on the logits' device.
    """
    if all(each.temperature == 0 for each in params):
        return ops.greedy_sample(logits)

    def column(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
        return to_device(torch.tensor(values, dtype=dtype), logits.device)

    return ops.sample(
        logits,
        column([each.temperature for each in params], torch.float32),
        column([max(0, each.top_k) for each in params], torch.int32),
        column([each.top_p for each in params], torch.float32),
        column([each.min_p for each in params], torch.float32),
        column([each.seed % 2**63 for each in params], torch.int64),
        column(list(drawn), torch.int64),
    )
