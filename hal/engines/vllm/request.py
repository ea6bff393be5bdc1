"""The requests that vLLM's scheduler has told a worker of, kept in the rows of an input batch."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor

from hal.generation.prompt_inputs import PromptInputs
from hal.nn import EncoderItem
from hal.nn.encoder import VIDEO
from hal.step import InputBatch


class Groups(Protocol):
    """Cache groups with blocks of their own, which tell what hal's blocks and slots are."""

    def tables(self, blocks: Sequence[Sequence[int]], known: Sequence[int]) -> Iterable[tuple[int, list[int]]]:
        """Yield the number of each group with a block table, and its blocks after the ``known`` ones."""

    def slots(self, blocks: Sequence[Sequence[int]], tokens: int) -> list[int]:
        """Return the slots of a sequence whose step ends after ``tokens``."""


class AdapterSlots(Protocol):
    """The slots of vLLM's adapters; see :class:`hal.engines.vllm.adapters.LoadedAdapters`."""

    def of_step(self, requests: Sequence[Any]) -> list[int]:
        """Return the slot of each request's adapter in a step."""

    def add(self, request: Any) -> None:
        """Load an adapter unless it is loaded, or if ``load_inplace`` asks for it."""


PENDING = -1
"""The mark of a sampled token that only the device has, as in vLLM's own lists of tokens."""


@attrs.define(eq=False)
class Request:
    """A request that has not finished.

    Attributes:
        name: vLLM's id of it.
        prompt: its token ids.
        params: vLLM's sampling parameters.
        blocks: its blocks of each cache group, in order.
        computed: the number of its tokens that were in the cache when its last step was scheduled.
        outputs: the tokens that were sampled. The last one is ``PENDING`` while only the device has it.
        seed: its seed, or the one that it was given.
        drawn: the number of tokens by which its prompt has been extended. The draws of its outputs count on from there.
        row: its row, or -1.
        adapter: vLLM's request for its adapter; None for none.
        inputs: the inputs of its prompt beside the tokens, such as images; None for text alone.
        scored: the number of prompt tokens that were scored.
        prompt_logprobs: these, in parts.
        token_scores: those of given tokens at the prompt's tokens, in parts.
        drafted: the places behind drafted tokens.
    """

    name: str
    prompt: list[int]
    params: Any
    blocks: list[list[int]]
    computed: int
    outputs: list[int]
    inputs: PromptInputs | None = None
    adapter: Any = None
    seed: int = 0
    drawn: int = 0
    row: int = -1
    scored: int = 0
    prompt_logprobs: list[Any] = attrs.field(factory=list)
    token_scores: list[Tensor] = attrs.field(factory=list)
    drafted: list[Place] = attrs.field(factory=list)

    @property
    def tokens(self) -> list[int]:
        """A copy of its tokens so far."""
        return self.prompt + self.outputs

    @property
    def given_tokens(self) -> Any:
        """The tokens to score at the prompt's tokens; None for none, and before vLLM 0.31."""
        return getattr(self.params, "prompt_logprob_token_ids", None)

    def to_score(self, count: int) -> int:
        """Return how many of the next ``count`` tokens give a log-probability that is not known yet."""
        if self.params.prompt_logprobs is None and self.given_tokens is None:
            return 0
        first = max(self.computed, self.scored)
        return max(0, min(self.computed + count, len(self.prompt) - 1) - first)

    def places(self, drafts: Sequence[int], count: int) -> list[Request | Place]:
        """Return ``count`` places for tokens: its next one, and those behind its drafts, then padding."""
        while len(self.drafted) < count - 1:
            self.drafted.append(Place(self))
        for number, place in enumerate(self.drafted[: count - 1], 1):
            place.put(drafts[:number])
        return [self, *self.drafted[: count - 1]]


@attrs.define(eq=False)
class Place:
    """A place behind drafted tokens of a request, for which vLLM's sampler chooses as if they were sampled.

    Attributes:
        request: the request.
        outputs: its outputs and the drafted tokens. The list stays the same, since logits processors keep it.
        known: how many of them are outputs.
    """

    request: Request
    outputs: list[int] = attrs.field(factory=list)
    known: int = 0

    def put(self, drafts: Sequence[int]) -> None:
        """Replace the drafted tokens of the last step."""
        del self.outputs[self.known :]
        self.outputs += self.request.outputs[self.known :]
        self.known = len(self.outputs)
        self.outputs += drafts

    @property
    def prompt(self) -> list[int]:
        """The request's prompt."""
        return self.request.prompt

    @property
    def params(self) -> Any:
        """The request's sampling parameters."""
        return self.request.params

    @property
    def seed(self) -> int:
        """The request's seed."""
        return self.request.seed

    @property
    def drawn(self) -> int:
        """The request's ``drawn``."""
        return self.request.drawn


Chosen = Request | Place
"""What a token is chosen for."""


def fields_of(kind: str, items: Sequence[EncoderItem]) -> dict[str, Tensor]:
    """Return the items of a kind as fields for vLLM, each joined."""
    own = [each for each in items if each.kind == kind]
    if not own:
        return {}
    found = {"values": torch.cat([each.values for each in own]), "grid": torch.tensor([each.grid for each in own])}
    if kind == VIDEO:
        found["seconds"] = torch.tensor([each.seconds for each in own], dtype=torch.float64)
        found["times"] = torch.tensor([time for each in own for time in each.times or ()], dtype=torch.float64)
    return {f"{kind}_{name}": each for name, each in found.items()}


def item_of(kind: str, fields: Mapping[str, Any], digest: bytes = b"") -> EncoderItem:
    """Return an image or a video as an item of the model's encoder, from its part of :func:`fields_of`."""
    time, height, width = fields[f"{kind}_grid"].data.flatten().tolist()
    item = EncoderItem(kind, fields[f"{kind}_values"].data, (time, height, width), digest)
    if kind != VIDEO:
        return item
    times = tuple(fields[f"{kind}_times"].data.flatten().tolist())
    return attrs.evolve(item, seconds=float(fields[f"{kind}_seconds"].data), times=times)


class Requests:
    """The requests, of which those that run have a row.

    Args:
        seed: decides the seeds of requests without one. All ranks of a replica have the same, and so draw the same
            tokens; replicas have different ones.
        groups: the cache groups; None if there is one, whose blocks are hal's.
        prompt_inputs: returns the inputs of a prompt, given its tokens and its images and videos.
        dropped: each is called with every request that ends, or starts anew.
        adapters: the slots of the requests' adapters; None if no request has one.
    """

    def __init__(
        self,
        inputs: InputBatch,
        seed: str,
        groups: Groups | None = None,
        prompt_inputs: Callable[[list[int], Sequence[EncoderItem]], PromptInputs | None] = lambda tokens, items: None,
        dropped: Sequence[Callable[[Request], object]] = (),
        adapters: AdapterSlots | None = None,
    ) -> None:
        self.inputs, self._seeds, self._groups = inputs, random.Random(seed), groups
        self._prompt_inputs, self._dropped, self._adapters = prompt_inputs, dropped, adapters
        self._known: dict[str, Request] = {}
        self._by_row: list[Request] = []

    def update(self, scheduled: Any) -> None:
        """Take in what the scheduler decided for a step: finished, new and continued requests, and their blocks."""
        for name in sorted(scheduled.finished_req_ids):  # A set is in another order on each rank.
            if name in self._known:
                self._drop(self._known.pop(name))
        cached, known = scheduled.scheduled_cached_reqs, self._known
        for new in scheduled.scheduled_new_reqs:
            earlier, tokens = known.get(new.req_id), new.prefill_token_ids
            # For the second model runner, a preempted request comes as a new one, with its outputs behind its prompt.
            if earlier is not None and tokens is not None and earlier.prompt == new.prompt_token_ids:
                self._take_params(earlier, new.sampling_params)
                self._restart(earlier, new.block_ids, new.num_computed_tokens, len(tokens) - len(earlier.prompt))
            else:
                self._add(new)
        resumed = cached.resumed_req_ids  # by the scheduler for the first model runner
        for name, blocks, computed, outputs in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
        ):
            request = known[name]
            if name in resumed:
                self._restart(request, blocks, computed, outputs)
                continue
            request.computed = computed
            if request.outputs:  # The scheduler may count drafted tokens of a running step, which were rejected.
                request.computed = min(computed, len(request.prompt) + len(request.outputs) - 1)
            if blocks is not None:
                before = [len(each) for each in request.blocks]
                for own, new in zip(request.blocks, blocks, strict=True):
                    own += new
                if request.row >= 0:
                    self.inputs.set_cached(request.row, request.computed)  # Blocks before the window may come again.
                    for group, ids in self._tables(request.blocks, before):
                        self.inputs.extend(request.row, (), ids, group=group)
        for name in scheduled.num_scheduled_tokens:
            if known[name].row < 0:
                self._place(known[name], scheduled.num_scheduled_tokens)
        if self._groups is not None:
            for name, count in scheduled.num_scheduled_tokens.items():
                request = known[name]
                self.inputs.set_slots(request.row, self._groups.slots(request.blocks, request.computed + count))
        if self._adapters is not None:
            adapted = [known[name] for name in scheduled.num_scheduled_tokens if known[name].adapter is not None]
            slots = self._adapters.of_step([each.adapter for each in adapted])
            for request, slot in zip(adapted, slots, strict=True):
                self.inputs.set_adapter(request.row, slot)

    def restarts(self, scheduled: Any) -> bool:
        """Return whether a step starts a known request anew, or runs nothing. Such a step reads all tokens so far."""
        new = any(each.req_id in self._known for each in scheduled.scheduled_new_reqs)
        return new or bool(scheduled.scheduled_cached_reqs.resumed_req_ids) or not scheduled.num_scheduled_tokens

    def running(self, names: Collection[str]) -> list[Request]:
        """Return the requests of a step, in the order of their rows. All of them have one."""
        if len(names) == len(self._by_row):
            return [*self._by_row]
        return [each for each in self._by_row if each.name in names]

    def defer(self, requests: Sequence[Request], tokens: Tensor) -> None:
        """Append a sampled token to each request, which the host does not know yet."""
        self.inputs.extend_pending([each.row for each in requests], tokens)
        for each in requests:
            each.outputs.append(PENDING)

    def settle(self, requests: Sequence[Request], tokens: Sequence[int]) -> None:
        """Append a sampled token to each request, or replace the one that was deferred. Some may have finished."""
        rows, placed = [], []
        for request, token in zip(requests, tokens, strict=True):
            if (outputs := request.outputs) and outputs[-1] == PENDING:
                outputs[-1] = token
            else:
                outputs.append(token)
            if request.row >= 0:
                rows.append(request.row)
                placed.append(token)
        self.inputs.extend_each(rows, placed)

    def accept(self, request: Request, tokens: Sequence[int]) -> None:
        """Append sampled tokens to a request, in place of drafted ones."""
        start = len(request.prompt) + len(request.outputs)
        request.outputs += tokens
        if request.row >= 0:
            self.inputs.accept(request.row, start, tokens)

    def _add(self, new: Any) -> None:
        """Add a request. A session that goes on comes as a new one, with the tokens so far in its prompt."""
        prompt, before = list(new.prompt_token_ids), self._known.get(new.req_id)
        outputs = list((new.prefill_token_ids or ())[len(prompt) :])
        blocks = [*map(list, new.block_ids)]
        request = Request(new.req_id, prompt, new.sampling_params, blocks, new.num_computed_tokens, outputs)
        request.adapter = new.lora_request
        if self._adapters is not None and request.adapter is not None and request.adapter.load_inplace:
            self._adapters.add(request.adapter)
        if new.mm_features:
            items = [item_of(each.modality, each.data, each.identifier.encode()) for each in new.mm_features]
            request.inputs = self._prompt_inputs(prompt, items)
        if before is not None:
            self._drop(before)
            request.seed = before.seed
            request.scored, request.prompt_logprobs = before.scored, before.prompt_logprobs
            request.token_scores = before.token_scores
            # Outputs do not count: with asynchronous scheduling, one more may have been sampled, and dropped.
            request.drawn = before.drawn + len(prompt) - len(before.prompt)
        elif new.sampling_params.seed is None:
            request.seed = self._seeds.getrandbits(63)
        self._take_params(request, new.sampling_params)
        self._known[new.req_id] = request

    def _take_params(self, request: Request, params: Any) -> None:
        request.params = params
        if params.seed is not None:
            request.seed = params.seed % 2**63

    def _restart(self, request: Request, blocks: Sequence[Sequence[int]], computed: int, outputs: int) -> None:
        """Let a preempted request start anew, with its first ``outputs`` outputs."""
        self._drop(request)
        request.blocks = [*map(list, blocks)]
        del request.outputs[outputs:]  # The scheduler may have dropped the output of a running step.
        request.drafted.clear()
        if not (request.outputs or request.prompt_logprobs or request.token_scores):
            request.scored = 0  # That output may have had them.
        request.computed = computed

    def _place(self, request: Request, scheduled: Container[str]) -> None:
        if len(self.inputs) == self.inputs.max_sequences:  # A request that waits gives its row away.
            self._drop(next(each for each in self._by_row if each.name not in scheduled))
        tokens, slot = request.prompt + request.outputs, 1 if self.inputs.slotted else None  # set for each step
        (_, first), *others = self._tables(request.blocks, [0] * len(request.blocks))
        request.row = self.inputs.add(tokens, first, cached=request.computed, slot=slot)
        for group, ids in others:
            self.inputs.extend(request.row, (), ids, group=group)
        self._by_row.append(request)

    def _tables(self, blocks: Sequence[Sequence[int]], known: Sequence[int]) -> list[tuple[int, Sequence[int]]]:
        """Return the number of each group with a block table, and its blocks after the ``known`` ones."""
        return [(0, blocks[0][known[0] :])] if self._groups is None else [*self._groups.tables(blocks, known)]

    def _drop(self, request: Request) -> None:
        """Take a request's row, if it has one, and move the last row there."""
        for each in self._dropped:
            each(request)
        if request.row < 0:
            return
        self.inputs.remove(request.row)
        last = self._by_row.pop()
        if last is not request:
            self._by_row[request.row], last.row = last, request.row
        request.row = -1
