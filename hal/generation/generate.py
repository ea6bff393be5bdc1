"""The generation loop: schedules many prompts on a runner until each is finished."""

from __future__ import annotations

import logging
import operator
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import attrs
import torch
from torch import Tensor

from hal import ops
from hal.config.bounds import SEQUENCES
from hal.device.group import Group
from hal.errors import BatchError, ConfigError, NumericsError
from hal.execution.host_copy import HostCopy
from hal.execution.runner import Runner
from hal.generation.penalties import PenaltyTable, has_penalties
from hal.generation.sampling_params import SamplingParams, choose
from hal.generation.token_masks import allowed_tokens
from hal.parallel.heartbeat import Heartbeat
from hal.parallel.host_values import gather_values
from hal.step import to_device
from hal.step.block_allocator import BlockAllocator
from hal.step.prefix_cache import PrefixCache

log = logging.getLogger("hal.generation")


@attrs.frozen
class Token:
    """A new token of one prompt.

    Attributes:
        prompt_index: the index of the prompt.
        token_id: the token.
        finished: for the prompt's last token, ``stop`` (a stop token) or ``length`` (no room for more); else None.
    """

    prompt_index: int
    token_id: int
    finished: Literal["stop", "length"] | None


@attrs.define(eq=False)
class _Sequence:
    """A prompt and its new tokens.

    Attributes:
        tokens: the prompt, and the new tokens that the host knows.
        length: the length of the prompt.
        limit: the most new tokens.
        cached: the tokens of the prompt that the cache already holds.
        drawn: the number of tokens drawn.
        unread: how many of those the host does not know.
        row: its row in the input batch.
        penalties: its row in the table of penalties, from the first step on.
    """

    prompt_index: int
    tokens: list[int]
    params: SamplingParams
    length: int
    limit: int
    blocks: list[int] = attrs.field(factory=list)
    slots: list[int] = attrs.field(factory=list)
    cached: int = 0
    drawn: int = 0
    unread: int = 0
    row: int = -1
    penalties: int | None = None

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.length :]

    @property
    def finished(self) -> Literal["stop", "length"] | None:
        """The reason, if the last token is known."""
        if len(self.tokens) > self.length and self.tokens[-1] in self.params.stop_token_ids:
            return "stop"
        return "length" if len(self.tokens) == self.length + self.limit else None


def generate(
    runner: Runner, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
) -> Iterator[Token]:
    """Continue all ``prompts``, yielding the tokens of each step in the order of the prompts.

    A prompt starts as soon as the cache has room for all its tokens. Its tokens do not depend on the other prompts.

    With several data ranks, every rank passes the same prompts, and gets the tokens of all. The ranks share the
    prompts, and exchange the tokens when all are finished, however long the others take.

    Args:
        runner: runs the steps.
        prompts: the token ids of each prompt.
        params: one for all prompts, or one for each.

    Raises:
        BatchError: a prompt is empty, longer than the model or the cache, or has a token id out of range. All prompts
            are checked before the first step.
        ConfigError: ``params`` has another type; or a mask returns something else than its documentation says, or
            allows no token.
        NumericsError: the logits have a NaN.
        CommunicationError: another data rank raised an exception, has ended, or does not answer within
            ``parallel.timeout``.
        ClosedError: the runner is closed. The iterator raises it if that happens between two steps.
    """
    if not isinstance(prompts, Iterable):
        raise BatchError(f"prompts is {prompts!r:.70}", "give a list of prompts, each a list of token ids")
    prompts = list(prompts)
    per_prompt = [params] * len(prompts) if isinstance(params, SamplingParams) else _each(params)
    if len(per_prompt) != len(prompts):
        raise BatchError(
            f"got {len(prompts)} prompts and {len(per_prompt)} params", "give one for all prompts, or one for each"
        )
    waiting = deque(
        _checked(runner, index, prompt, wanted)
        for index, (prompt, wanted) in enumerate(zip(prompts, per_prompt, strict=True))
    )
    data = runner.backend.mesh.data
    return _Generation(runner, waiting).run() if data.size == 1 else _run_share(runner, waiting, data)


def _run_share(runner: Runner, prompts: Iterable[_Sequence], data: Group) -> Iterator[Token]:
    """Run this data rank's share of the prompts, and yield the tokens of all."""
    mine = deque(each for each in prompts if each.prompt_index % data.size == data.rank)
    hosts = runner.backend.mesh.hosts
    if runner.backend.lockstep:
        found = list(_Generation(runner, mine).run())
        while runner.idle():
            pass
    else:
        with Heartbeat(hosts):
            found = list(_Generation(runner, mine).run())
    for tokens in gather_values(hosts, found):
        yield from tokens


def _each(params: Any) -> list[SamplingParams]:
    found = list(params) if isinstance(params, Iterable) else [params]
    if all(isinstance(each, SamplingParams) for each in found):
        return found
    raise ConfigError(f"params is {params!r:.70}", "give hal.SamplingParams(...), or a list with one for each prompt")


def _checked(runner: Runner, index: int, tokens: Sequence[int], params: SamplingParams) -> _Sequence:
    try:
        given = list(tokens)
        if bool in map(type, given):
            raise TypeError
        prompt = list(map(operator.index, given))
    except TypeError:
        raise BatchError(f"prompt {index} is {tokens!r:.70}", "give each prompt as a list of token ids") from None
    longest, capacity = runner.model.max_length, runner.spec.num_tokens
    if not prompt:
        raise BatchError(f"prompt {index} is empty", "give it at least one token")
    if len(prompt) >= longest:
        raise BatchError(
            f"prompt {index} has {len(prompt)} tokens; with new tokens, the model takes at most {longest}",
            "shorten the prompt",
        )
    if not all(0 <= token < runner.model.vocab_size for token in prompt):
        raise BatchError(
            f"prompt {index} has a token id out of the range 0 to {runner.model.vocab_size - 1}",
            "use the tokenizer of the model",
        )
    limit = min(params.max_new_tokens, longest - len(prompt))
    if limit < params.max_new_tokens:
        log.warning("prompt %d gets %d new tokens, not %d: the model's limit", index, limit, params.max_new_tokens)
    if len(prompt) + limit > capacity:
        raise BatchError(
            f"prompt {index} needs {len(prompt) + limit} tokens of cache, but the cache holds {capacity}",
            "raise cache.num_tokens, shorten the prompt, or ask for fewer new tokens",
        )
    return _Sequence(index, prompt, params, len(prompt), limit)


class _Generation:
    """The sequences of one call of :func:`generate`. Those that run have a row of an input batch.

    While the device runs a step, the host reads the tokens of the one before and prepares the next: sampled tokens
    stay on the device, where the next step reads them. So a sequence that a stop token ends has run in one step more,
    whose token is dropped. On a host, a step has ended when it returns, and its tokens are read at once. Which of the
    two applies depends on the device alone, so that ranks that share a model run the same steps.
    """

    def __init__(self, runner: Runner, waiting: deque[_Sequence]) -> None:
        self._runner, self._waiting = runner, waiting
        self._overlaps = runner.backend.device.torch.type != "cpu"
        self._running: list[_Sequence] = []  # by row
        self._unread: tuple[list[_Sequence], HostCopy] | None = None
        self._inputs = runner.input_batch(
            min(max(len(waiting), 1), SEQUENCES), max((each.length + each.limit for each in waiting), default=1)
        )
        penalized = any(has_penalties(each.params) for each in waiting)
        self._table = PenaltyTable(runner.model.vocab_size, runner.backend.device.torch) if penalized else None

    def run(self) -> Iterator[Token]:
        """Run steps of new prompts, and of one token of each running sequence, in turn."""
        try:
            while self._waiting or self._running:
                if admitted := self._admit():
                    yield from self._step(admitted)
                elif not self._running:
                    raise BatchError(
                        f"prompt {self._waiting[0].prompt_index} has no room in the cache: other sequences hold its "
                        "blocks or slots",
                        "finish or close the other generate() of this runner, or raise cache.num_tokens (or "
                        "num_sequences)",
                    )
                if going := [each for each in self._running if each.finished is None and each.drawn < each.limit]:
                    yield from self._step(going)
                else:
                    yield from self._read()
        finally:
            for sequence in self._running:  # The caller may stop early.
                self._give_back(sequence)

    def _admit(self) -> list[_Sequence]:
        """Return the next prompts that fit into the cache, with their new tokens, and into one step."""
        runner, blocks = self._runner, self._blocks
        most = runner.backend.config.max_prefill_tokens
        admitted: list[_Sequence] = []
        tokens = 0
        while self._waiting and len(self._running) < self._inputs.max_sequences:
            first = self._waiting[0]
            # The last token always runs, for its logits.
            shared = [] if runner.prefixes is None else runner.prefixes.reuse(first.tokens[:-1])
            cached = len(shared) * runner.spec.block_size
            tokens += first.length - cached
            joins = not admitted or tokens <= most
            needed = runner.spec.blocks_for(first.length + first.limit) - len(shared)
            has_slot = not runner.slots.needed or runner.slots.num_free > 0
            own = blocks.take(needed) if joins and has_slot else None
            if own is None:
                blocks.give_back(shared)
                break
            first.blocks, first.cached = shared + own, cached
            first.slots = (runner.slots.take(1) or []) if runner.slots.needed else []
            slot = first.slots[0] if first.slots else None
            first.row = self._inputs.add(first.tokens, first.blocks, cached=cached, slot=slot)
            admitted.append(self._waiting.popleft())
            self._running.append(first)
        return admitted

    def _step(self, sequences: list[_Sequence]) -> list[Token]:
        """Start a step of sequences, in the order of their rows, and return tokens that became known."""
        runner, inputs = self._runner, self._inputs
        counts = None if sequences[0].drawn else [each.length - each.cached for each in sequences]
        with runner.uses, runner.backend.translating_errors():  # Open until the logits are read: they may be a graph's.
            rows = [each.row for each in sequences]
            batch = inputs.batch(counts, rows=rows)
            logits = runner.step(batch).logits
            inputs.advance(counts, rows=rows)
            for each in sequences:
                each.unread += 1
            found = self._read()  # During the step. Masks need these tokens.
            with torch.inference_mode():
                wrong = logits.amax(-1).isnan()
                chosen = self._choose(sequences, logits).masked_fill_(wrong, 0)  # A next step may read it.
            for each in sequences:
                each.drawn += 1
            self._unread = sequences, HostCopy(runner.backend, chosen, wrong)
            if not self._overlaps:
                return self._read()
            inputs.extend_pending([each.row for each in sequences], chosen)
        return found

    def _choose(self, sequences: list[_Sequence], logits: Tensor) -> Tensor:
        """Return the next token of each sequence, on the device."""
        masks = [None if each.finished else each.params.mask for each in sequences]
        table = self._table
        rows = [] if table is None else [self._penalties(table, each) for each in sequences]
        if table is not None and any(rows):
            logits = table.penalize(logits, rows)
        if any(each is not None for each in masks):
            generated = [each.generated for each in sequences]
            allowed = allowed_tokens([each.prompt_index for each in sequences], masks, generated, logits.shape[-1])
            logits = ops.mask_logits(logits, to_device(allowed, logits.device))
        chosen = choose(logits, [each.params for each in sequences], [each.drawn for each in sequences])
        if table is not None and any(rows):
            table.count(chosen)
        return chosen

    @staticmethod
    def _penalties(table: PenaltyTable, sequence: _Sequence) -> int:
        if sequence.penalties is None:
            sequence.penalties = table.add(sequence.tokens, sequence.params)
        return sequence.penalties

    def _read(self) -> list[Token]:
        """Return the tokens of the last step, in the order of the prompts. Waits for it.

        Raises:
            NumericsError: its logits have a NaN.
        """
        if self._unread is None:
            return []
        (sequences, copy), self._unread = self._unread, None
        chosen, wrong = (each.tolist() for each in copy.wait())
        going = [each for each in sequences if each.finished is None]
        if bad := [each for each, is_wrong in zip(sequences, wrong, strict=True) if is_wrong and each in going]:
            raise NumericsError(
                f"the model gave NaN logits for prompt {', '.join(str(each.prompt_index) for each in bad)}",
                "check the weights; float16 overflows where bfloat16 and float32 do not (dtype in the config, --dtype)",
            )
        self._inputs.extend_each([each.row for each in sequences], chosen)
        for sequence, token in zip(sequences, chosen, strict=True):
            sequence.unread -= 1
            if sequence.finished is None:
                if not sequence.generated:  # Its prompt is in the cache. A failure of the device has been raised.
                    self._remember(sequence)
                sequence.tokens.append(token)
        found = [Token(each.prompt_index, each.tokens[-1], each.finished) for each in going]
        for each in sequences:
            if each.finished and not each.unread:
                self._release(each)
        return sorted(found, key=lambda token: token.prompt_index)

    def _release(self, sequence: _Sequence) -> None:
        """Free what a finished sequence holds. The last row takes the place of its row."""
        self._inputs.remove(sequence.row)
        last = self._running.pop()
        if last is not sequence:
            self._running[sequence.row], last.row = last, sequence.row
        self._remember(sequence)
        self._give_back(sequence)
        if self._table is not None and sequence.penalties is not None:
            self._table.remove(sequence.penalties)

    def _remember(self, sequence: _Sequence) -> None:
        """Let later prompts reuse the tokens in the cache: all but the last chosen one, which has not run."""
        if self._runner.prefixes is not None:
            tokens = sequence.tokens[:-1] if sequence.generated else sequence.tokens
            self._runner.prefixes.remember(sequence.blocks, tokens)

    def _give_back(self, sequence: _Sequence) -> None:
        self._blocks.give_back(sequence.blocks)
        if not self._runner.closed:  # Tokens that nobody asks for may outlive the runner.
            self._runner.slots.give_back(sequence.slots)

    @property
    def _blocks(self) -> BlockAllocator | PrefixCache:
        return self._runner.prefixes or self._runner.blocks
