"""Drafts from a model: a smaller one of the same vocabulary, or layers that read the hidden states of the model.

The drafter's cache has the block numbers of the model's, so that prefixes which requests share are shared here, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from hal.execution.runner import Runner
from hal.execution.step_output import StepOutput
from hal.generation.choosing import choose
from hal.generation.drafting.drafter import Drafter, Drafts
from hal.generation.request import Request
from hal.nn import DraftLM
from hal.step import ALL, LAST, NONE, Wanted, to_device

UNDRAFTED = 8
"""The steps without drafts after which a text gets no more drafts from a model that would need all hidden states."""


@attrs.define(eq=False)
class Row:
    """A request in the drafter's batches.

    Attributes:
        number: its row; -1 as long as it has no token, which is behind a prompt of one token.
        known: how many of its row's tokens are the request's own; drafted ones follow.
        cached: how many of its tokens the cache has.
        blocks: how many blocks it has. Requests of an engine get more as they grow.
        drafted: how many tokens were drafted last.
        hidden: the model's hidden states for the tokens behind the cached ones, in parts.
    """

    number: int
    known: int
    cached: int
    blocks: int = 0
    drafted: int = 0
    hidden: list[Tensor] = attrs.field(factory=list)


class ModelDrafter(Drafter):
    """Drafts a chain of tokens in as many steps of a model. The host does not wait for them.

    Each draft is drawn with the random numbers of its place in the request's own sequence, as the model draws there.

    Args:
        runner: the drafting model's, whose cache has as many blocks, of as many tokens, as the model's.
        tokens: the most tokens of a chain.
        max_requests: the most requests.
        max_length: the most tokens of a request.

    Attributes:
        reads: the model, if it reads hidden states of the model that it drafts for; else None.
    """

    def __init__(self, runner: Runner, tokens: int, max_requests: int, max_length: int) -> None:
        self.tokens, self.drafting = tokens, runner
        self.reads = runner.model if isinstance(runner.model, DraftLM) else None
        self._runner, self._ahead = runner, int(self.reads is not None)
        self._inputs = runner.input_batch(max_requests, max_length, spare=tokens)
        self._rows: dict[Request, Row] = {}
        self._queries = runner.captured_queries

    def ran(
        self,
        requests: Sequence[Request],
        starts: Sequence[int],
        counts: Sequence[int],
        output: StepOutput,
        accepted: Sequence[int] | None,
    ) -> None:
        """Run a step's prompts, or note which drafts are right."""
        if accepted is not None and not any(each in self._rows for each in requests):
            return
        hidden = self._read(output)
        for index, each in enumerate(requests):
            if each not in self._rows:
                if accepted is not None or each.length > self._runner.model.max_length:
                    continue  # A text that is too long for the drafter is never drafted.
                self._rows[each] = Row(-1, 0, starts[index])
                self._extend(each, each.length)
            self._extend_blocks(each)
            row, new = self._rows[each], counts[index]
            if accepted is not None:
                new = 1 + accepted[index]
                if not self._ahead:  # Else a step with the model's hidden states takes the place of those of drafts.
                    row.cached = min(row.cached + accepted[index], row.known + max(0, row.drafted - 1))
            if hidden is not None:
                first = sum(counts[:index])
                row.hidden.append(hidden[first : first + new].clone())
                if len(row.hidden) > UNDRAFTED:
                    self.end(each)
        if accepted is None:
            self._read_prompts(requests, starts, counts)

    def _read(self, output: StepOutput) -> Tensor | None:
        """Return the hidden states that the model reads of a step of the model that it drafts for, if any."""
        if self.reads is None:
            return None
        name = self.reads.reads
        return self.reads.read(output.hidden_states if name is None else output.extra[name])

    def _read_prompts(self, requests: Sequence[Request], starts: Sequence[int], counts: Sequence[int]) -> None:
        """Run the tokens of prompts that the model ran, as far as those that a batch has are known."""
        going, new = [], []
        for each, start, count in zip(requests, starts, counts, strict=True):
            if each not in self._rows:
                continue
            row = self._rows[each]
            if (more := min(start + count, row.known) - row.cached) > 0:
                going.append(row)
                new.append(more)
        if going:
            self._step(going, new, new, NONE)
            for row, more in zip(going, new, strict=True):
                row.cached += more

    def propose(self, requests: Sequence[Request], most: int) -> Drafts:
        """Draft a chain of tokens for each request."""
        longest = self._runner.model.max_length
        going = [each for each in requests if each in self._rows and len(each.tokens) + most <= longest]
        if not going:
            return Drafts([0] * len(requests), [[]] * len(requests))
        with self._runner.running():
            found = torch.stack(self._chain(going, most), dim=1)
        if len(going) == len(requests):
            return Drafts([most] * len(going), found)
        kept = set(going)
        whole = found.new_zeros(len(requests), most)
        whole[to_device([index for index, each in enumerate(requests) if each in kept], whole.device)] = found
        return Drafts([most * (each in kept) for each in requests], whole)

    def _chain(self, requests: Sequence[Request], most: int) -> list[Tensor]:
        """Return the drafts of each place, ``[requests]``."""
        for each in requests:
            self._extend(each, len(each.tokens))
        rows, params = [self._rows[each] for each in requests], [each.params for each in requests]
        numbers = [row.number for row in rows]
        logits, hidden = self._first(rows)
        drafts = []
        for place in range(most):
            drafts.append(choose(logits, params, [each.drawn + place for each in requests]))
            if place < most - 1:
                self._inputs.extend_pending(numbers, drafts[-1])
                fields: dict[str, Any] = {"hidden_states": hidden.clone()} if self._ahead else {}
                output = self._runner.step(self._inputs.batch(rows=numbers, **fields))
                self._inputs.advance(rows=numbers)
                logits, hidden = output.logits, output.hidden_states
        for row in rows:
            row.cached, row.drafted = row.known, most
        return drafts

    def _extend(self, request: Request, length: int) -> None:
        """Give a row the first ``length`` tokens of its request, in place of drafted ones."""
        row, tokens = self._rows[request], request.tokens[self._ahead : length]
        if row.number >= 0:
            self._inputs.truncate(row.number, row.known)
            self._inputs.extend(row.number, tokens[row.known :])
        elif tokens:
            row.number = self._inputs.add(tokens)
        self._extend_blocks(request)
        row.known = len(tokens)
        if row.number >= 0:
            row.cached = min(row.cached, max(0, row.known - 1)) if request.has_generated else row.cached
            self._inputs.set_cached(row.number, min(row.cached, row.known))

    def _extend_blocks(self, request: Request) -> None:
        row = self._rows[request]
        if row.number >= 0 and row.blocks < len(request.blocks):
            self._inputs.extend(row.number, (), request.blocks[row.blocks :])
            row.blocks = len(request.blocks)

    def _first(self, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
        """Run what the cache lacks of each row, and return the logits and hidden states of the last tokens."""
        new = [row.known - row.cached for row in rows]
        room = min(row.blocks * self._runner.spec.block_size - row.cached for row in rows)
        fitting = [each for each in self._queries if max(new) <= each <= room]
        run = [min(fitting)] * len(new) if fitting else new
        for row, own, whole in zip(rows, new, run, strict=True):
            if whole > own:
                self._inputs.extend(row.number, [0] * (whole - own))
        output = self._step(rows, new, run, LAST if run == new else ALL)
        ends = [sum(run[:index]) + own - 1 for index, own in enumerate(new)]
        at = to_device(ends, output.hidden_states.device)
        for row in rows:
            self._inputs.truncate(row.number, row.known)
        logits = output.logits if run == new else output.logits.index_select(0, at)
        return logits, output.hidden_states.index_select(0, at)

    def _step(self, rows: Sequence[Row], new: Sequence[int], run: Sequence[int], wanted: Wanted) -> StepOutput:
        """Run ``run`` tokens of each row, of which the first ``new`` are its own."""
        numbers, fields = [row.number for row in rows], dict[str, Any]()
        if self._ahead:
            parts = []
            for row, own, whole in zip(rows, new, run, strict=True):
                states = torch.cat(row.hidden)
                parts += [states[:own], states.new_zeros(whole - own, states.shape[1])]
                row.hidden = [states[own:]]
            fields = {"hidden_states": torch.cat(parts)}
        output = self._runner.step(self._inputs.batch(run, rows=numbers, **fields), wanted)
        self._inputs.advance(run, rows=numbers)
        return output

    def remembered(self, request: Request) -> int:
        """Return how many of a request's first tokens the drafter's cache has."""
        return self._rows[request].cached if request in self._rows else 0

    def end(self, request: Request) -> None:
        """Drop a request's row. The last row takes its place."""
        row = self._rows.pop(request, None)
        if row is not None and row.number >= 0 and (moved := self._inputs.remove(row.number)) is not None:
            next(each for each in self._rows.values() if each.number == moved).number = row.number

    def clear(self) -> None:
        """Drop all rows."""
        for each in list(self._rows):
            self.end(each)
