"""The requests that vLLM's scheduler has told a worker of, kept in the rows of an input batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
import torch
from torch import Tensor

from hal.step import InputBatch

PENDING = -1
"""The mark of a sampled token that only the device has, as in vLLM's own lists of tokens."""


@attrs.define(eq=False)
class Request:
    """A request that has not finished.

    Attributes:
        prompt: its token ids.
        params: vLLM's sampling parameters.
        blocks: its blocks, in order.
        computed: the number of its tokens in the cache.
        outputs: the tokens that were sampled. The last one is ``PENDING`` while only the device has it.
        generator: the random generator of a request with a seed.
        scored: of how many of the prompt's tokens the log-probabilities are known.
        prompt_logprobs: these, in parts.
    """

    prompt: list[int]
    params: Any
    blocks: list[int]
    computed: int
    outputs: list[int]
    generator: torch.Generator | None = None
    scored: int = 0
    prompt_logprobs: list[Any] = attrs.field(factory=list)

    def to_score(self, end: int) -> int:
        """Return how many of the last tokens up to ``end`` give a log-probability that is not known yet."""
        if self.params.prompt_logprobs is None:
            return 0
        first = max(self.computed, self.scored)
        return max(0, min(end, len(self.prompt) - 1) - first)


class Requests:
    """The requests, of which those that run have a row.

    Args:
        inputs: the rows.
        device: the device of random generators.
    """

    def __init__(self, inputs: InputBatch, device: torch.device) -> None:
        self.inputs, self._device = inputs, device
        self._known: dict[str, Request] = {}
        self._rows: dict[str, int] = {}
        self._names: list[str] = []  # by row

    def __getitem__(self, name: str) -> Request:
        return self._known[name]

    def rows(self, names: Iterable[str]) -> list[int]:
        """Return the rows of requests."""
        return [self._rows[name] for name in names]

    def update(self, scheduled: Any) -> None:
        """Take in what the scheduler decided for a step: finished, new and continued requests, and their blocks."""
        for name in scheduled.finished_req_ids:
            self._known.pop(name, None)
            self._drop(name)
        for new in scheduled.scheduled_new_reqs:
            params = new.sampling_params
            done = (new.prefill_token_ids or [])[
                len(new.prompt_token_ids) :
            ]  # A resumed request may come as a new one.
            before = self._known.get(new.req_id)
            self._drop(new.req_id)
            generator = None if before is None else before.generator
            if params.seed is not None and generator is None:
                generator = torch.Generator(self._device).manual_seed(params.seed)
            request = Request(
                list(new.prompt_token_ids),
                params,
                list(new.block_ids[0]),
                new.num_computed_tokens,
                list(done),
                generator,
            )
            if before is not None:
                request.scored, request.prompt_logprobs = before.scored, before.prompt_logprobs
            self._known[new.req_id] = request
        cached = scheduled.scheduled_cached_reqs
        for name, blocks, computed, outputs in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
        ):
            request = self._known[name]
            if name in cached.resumed_req_ids:
                self._drop(name)
                request.blocks = list(blocks[0])
                del request.outputs[outputs:]  # The scheduler may have dropped the tokens of a running step.
            elif blocks is not None:
                request.blocks += blocks[0]
                if name in self._rows:
                    self.inputs.extend(self._rows[name], (), blocks[0])
            if request.computed != computed:
                request.computed = computed
                if name in self._rows:
                    self.inputs.set_cached(self._rows[name], computed)
        for name in scheduled.num_scheduled_tokens:
            if name not in self._rows:
                self._place(name, scheduled.num_scheduled_tokens)

    def restarts(self, scheduled: Any) -> bool:
        """Return whether a step starts a known request anew, or runs nothing. Such a step reads all tokens so far."""
        new = any(each.req_id in self._known for each in scheduled.scheduled_new_reqs)
        return new or bool(scheduled.scheduled_cached_reqs.resumed_req_ids) or not scheduled.num_scheduled_tokens

    def defer(self, names: list[str], tokens: Tensor) -> None:
        """Append a sampled token to each request, which the host does not know yet."""
        rows = self.rows(names)
        self.inputs.put(rows, tokens)
        for name, row in zip(names, rows, strict=True):
            self.inputs.extend_pending(row)
            self._known[name].outputs.append(PENDING)

    def settle(self, name: str, tokens: list[int]) -> None:
        """Append sampled tokens to a request, or replace the one that was deferred. It may have finished."""
        request, row = self._known.get(name), self._rows.get(name)
        if request is None:
            return
        if request.outputs[-1:] == [PENDING]:
            request.outputs[-1:] = tokens
            if row is not None:
                self.inputs.resolve(row, *tokens)
        else:
            request.outputs += tokens
            self.inputs.extend(self._rows[name], tokens)

    def scored_prompts(self, names: list[str]) -> dict[str, list[Any]]:
        """Return, once, the log-probabilities of the prompts that are complete, in parts."""
        found = {}
        for name in names:
            request = self._known[name]
            if request.prompt_logprobs and request.scored == len(request.prompt) - 1:
                found[name], request.prompt_logprobs = request.prompt_logprobs, []
        return found

    def advance(self, names: list[str], counts: list[int]) -> None:
        """Count the tokens of a step as cached."""
        self.inputs.advance(counts, rows=self.rows(names))
        for name, count in zip(names, counts, strict=True):
            self._known[name].computed += count

    def _place(self, name: str, scheduled: Any) -> None:
        if len(self.inputs) == self.inputs.max_sequences:  # A request that waits gives its row away.
            self._drop(next(each for each in self._names if each not in scheduled))
        request = self._known[name]
        row = self.inputs.add(request.prompt + request.outputs, request.blocks, cached=request.computed)
        self._rows[name] = row
        self._names.append(name)

    def _drop(self, name: str) -> None:
        row = self._rows.pop(name, None)
        if row is None:
            return
        self.inputs.remove(row)
        last = self._names.pop()
        if last != name:
            self._names[row] = last
            self._rows[last] = row
