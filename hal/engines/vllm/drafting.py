"""Drafts of hal's drafters for vLLM's scheduler, which schedules them, and counts those that the model agrees with."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, takewhile

from vllm.v1.outputs import DraftTokenIds

import hal
from hal.engines.vllm.request import Request
from hal.engines.vllm.sampling import GREEDY
from hal.engines.vllm.step_output import Ran
from hal.generation.drafting.draft_length import Acceptance
from hal.generation.drafting.drafter import Drafter
from hal.generation.drafting.speculation import Speculation
from hal.generation.request import Request as Text
from hal.step import to_device


class Drafting:
    """The drafted tokens of vLLM's requests.

    Without asynchronous scheduling, vLLM takes the drafts behind a step, and schedules them. With it, vLLM schedules
    a number of drafts before the step's tokens are known, and the next step makes them.

    Args:
        runner: the model's.
        drafter: drafts tokens.
        longest: the most tokens of a request.
        asynchronous: whether vLLM schedules asynchronously.
    """

    def __init__(self, runner: hal.Runner, drafter: Drafter, *, longest: int, asynchronous: bool) -> None:
        self._runner, self._drafter = runner, drafter
        self._counted = Speculation(runner, drafter, adapt=False)
        self._longest, self._asynchronous = longest, asynchronous
        self._texts: dict[Request, Text] = {}
        self._proposed: dict[str, list[int]] = {}

    @property
    def acceptance(self) -> Acceptance:
        """How many drafted tokens the model agreed with so far."""
        return self._counted.acceptance

    def scheduled(self, numbers: Sequence[Sequence[int]], requests: Sequence[Request]) -> list[list[int]]:
        """Return the drafted tokens of each request in a step, at most as many as are scheduled.

        Args:
            numbers: the tokens that the scheduler names for each request, in which -1 is unknown.
        """
        if not self._asynchronous:
            return [list(takewhile(lambda token: token >= 0, own)) for own in numbers]
        self._propose([each for each, own in zip(requests, numbers, strict=True) if own])
        known = [self._proposed.get(each.name, []) for each in requests]
        return [own[: len(given)] for own, given in zip(known, numbers, strict=True)]

    def take(self, requests: Sequence[Request]) -> DraftTokenIds:
        """Return the drafts for the next step, or those of the step that waits for a grammar.

        Args:
            requests: those that got tokens in the last step.
        """
        if not self._asynchronous:
            self._propose(requests)
        return DraftTokenIds([*self._proposed], [[*own] for own in self._proposed.values()])

    def ran(self, step: Ran, tokens: Sequence[Sequence[int]]) -> None:
        """Show the drafter a step, before its tokens are appended to the requests.

        Args:
            tokens: those of each request that got some.
        """
        texts = [self._text(each) for each in step.requests]
        new, rights = iter(tokens), list[int | None]()
        for request, text, places, drafts in zip(step.requests, texts, step.places, step.drafts, strict=True):
            right = self._counted.accepted(drafts, next(new)) if places else None
            rights.append(right if request.computed >= text.length else None)
        ends = [*accumulate(step.counts)]
        for decoding in (False, True):
            chosen = [index for index, right in enumerate(rights) if (right is not None) == decoding]
            if not chosen:
                continue
            # Behind a prompt's last token, a step may have padding.
            counts = [step.counts[each] - (max(0, step.places[each] - 1) if not decoding else 0) for each in chosen]
            rows = [
                ends[each] - step.counts[each] + row
                for each, size in zip(chosen, counts, strict=True)
                for row in range(size)
            ]
            output = step.output if len(rows) == ends[-1] else _rows_of(step.output, rows)
            starts = [step.requests[each].computed for each in chosen]
            accepted = [right for right in rights if right is not None] if decoding else None
            with self._runner.running():
                self._drafter.ran([texts[each] for each in chosen], starts, counts, output, accepted)

    def end(self, request: Request) -> None:
        """Forget a request, which has ended or starts anew."""
        self._proposed.pop(request.name, None)
        if (text := self._texts.pop(request, None)) is not None:
            self._drafter.end(text)

    def _propose(self, requests: Sequence[Request]) -> None:
        rooms = {each: self._room(each) for each in requests}
        going, self._proposed = [each for each, room in rooms.items() if room > 0], {}
        if not going:
            return
        with self._runner.running():
            drafts = self._drafter.propose([self._text(each) for each in going], self._drafter.tokens).on_host()
        for request, count, own in zip(going, drafts.counts, drafts.tokens, strict=True):
            self._proposed[request.name] = [*own[: min(count, rooms[request])]]

    def _room(self, request: Request) -> int:
        """Return how many drafted tokens a request may still get."""
        params, length = request.params, len(request.prompt) + len(request.outputs)
        # vLLM tracks the thinking of a request by its tokens, and cannot take any back.
        if params.thinking_token_budget is not None or length + self._drafter.tokens > self._longest:
            return 0
        cached = length + self._drafter.tokens - 1  # by a model that drafts, of all but the last token
        if self._drafter.predicts and cached > len(request.blocks[0]) * self._runner.spec.block_size:
            return 0
        return self._longest if params.max_tokens is None else params.max_tokens - len(request.outputs) - 1

    def _text(self, request: Request) -> Text:
        """Return a request as the drafter sees it, with all its tokens."""
        text = self._texts.get(request)
        if text is None:
            params, tokens = request.params, request.tokens
            chosen = hal.SamplingParams(
                temperature=params.temperature if params.temperature >= GREEDY else 0.0,
                top_k=max(0, params.top_k),
                top_p=params.top_p,
                seed=request.seed,
            )
            text = self._texts[request] = Text(0, tokens, chosen, len(tokens), self._longest)
        text.tokens += request.outputs[len(text.tokens) - len(request.prompt) :]
        text.drawn = request.drawn + len(request.outputs)
        text.blocks = request.blocks[0]
        return text


def _rows_of(output: hal.StepOutput, rows: Sequence[int]) -> hal.StepOutput:
    """Return what a step computed of some tokens."""
    index = to_device(rows, output.hidden_states.device)
    extra = {name: each.index_select(0, index) for name, each in output.extra.items()}
    return hal.StepOutput(output.hidden_states.index_select(0, index), extra, None)
