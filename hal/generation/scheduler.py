"""The scheduler: runs requests together on a runner, and lets later ones join."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from hal import ops
from hal.config.bounds import SEQUENCES
from hal.errors import BatchError, NumericsError
from hal.execution.runner import Runner
from hal.execution.step_output import HostCopy, StepOutput
from hal.generation.choosing import Chooser
from hal.generation.drafting.speculation import Speculation
from hal.generation.logits_processing import logprobs_of, read_logprobs
from hal.generation.prompt_inputs import step_fields
from hal.generation.request import Place, Request, Token, adapters_of
from hal.ops.lora import NO_ADAPTER
from hal.step import ALL, NONE, to_device
from hal.step.block_allocator import BlockAllocator, PrefixCache

_plain, _row = attrgetter("plain"), attrgetter("row")  # without a call of Python for each request


def _prompt(pair: tuple[Request, Token]) -> int:
    return pair[0].prompt_index


class Scheduler:
    """Runs requests together: new prompts, and one token of each running request, in turn.

    A request starts as soon as the cache has room for all its tokens. Its tokens do not depend on the others.

    While the device runs a step, the host reads the tokens of the one before and prepares the next: sampled tokens
    stay on the device, where the next step reads them. So a request that a stop token ends has run in one step more,
    whose token is dropped. On a host, a step has ended when it returns, and its tokens are read at once. Which of the
    two applies depends on the device alone, so that ranks that share a model run the same steps.

    Threading: one thread at a time.

    Args:
        max_requests: the most requests that run together. Others wait.
        max_length: the most tokens of a request; None for the runner's limit.
        speculation: drafts tokens, which a step verifies. Each step is read before the next one then.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        max_requests: int = SEQUENCES,
        max_length: int | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self._runner, self._speculation = runner, speculation
        self._overlaps = runner.backend.device.torch.type != "cpu" and speculation is None
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # by row of the input batch
        self._admitted = False  # in the last step
        self._unread: tuple[list[Request], HostCopy] | None = None
        self._spare = 0 if speculation is None else speculation.spare
        self._inputs = runner.input_batch(max_requests, max_length, spare=self._spare)
        self._chooser = Chooser(runner.model.vocab_size, runner.backend.device.torch)

    @property
    def idle(self) -> bool:
        """Whether no request waits or runs."""
        return not self._waiting and not self._running

    @property
    def num_running(self) -> int:
        """The requests that run. Any thread may read it."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """The requests that wait. Any thread may read it."""
        return len(self._waiting)

    @property
    def blocks_in_use(self) -> int:
        """The blocks that running requests hold. Any thread may read it."""
        return len({block for each in list(self._running) for block in each.blocks})

    def add(self, request: Request) -> None:
        """Let a request wait for its first step.

        Raises:
            ConfigError: its adapter was removed.
        """
        if request.adapter is not None:
            request.loaded = adapters_of(self._runner).take(request.adapter)
        self._waiting.append(request)
        self._chooser.add(request)

    def cancel(self, request: Request) -> None:
        """Drop a request, and free what it holds. One that has ended stays as it is."""
        request.cancelled = True
        if request in self._waiting:
            self._waiting.remove(request)
            self._return_adapter(request)
        elif request in self._running and not request.unread:  # Else the step that it is in must end first.
            self._release(request)

    def close(self) -> None:
        """Free what all requests hold."""
        while self._waiting:
            self._return_adapter(self._waiting.pop())
        while self._running:
            self._give_back(self._running.pop())
        if self._speculation is not None:
            self._speculation.drafter.clear()

    def step(self) -> Sequence[tuple[Request, Token | Exception]]:
        """Run a step, and return tokens that became known with their requests, in the order of the prompts.

        A request whose mask fails ends, and its exception follows the tokens. It is a ConfigError if the mask returns
        something else than its documentation says, or allows no token.

        Raises:
            BatchError: the next request has no room, and no other runs.
            NumericsError: the logits have a NaN.
            ClosedError: the runner is closed.
        """
        found = self._advance()
        if (choices := self._runner.choices) is not None:
            for request, token in found:
                if token.finished is not None:
                    request.choices = choices.read(request.blocks, len(request.tokens) - 1)
        for each in list(self._running):
            if each.ended and not each.unread:
                self._release(each)
        if len(found) > 1:
            found.sort(key=_prompt)
        failed, self._chooser.failed = self._chooser.failed, []
        return [*found, *failed]

    def _advance(self) -> list[tuple[Request, Token]]:
        after_admission, self._admitted = self._admitted, False
        if not after_admission:
            if self._waiting and (admitted := self._admit()):
                self._admitted = True
                return self._step(admitted)
            if self._waiting and not self._running:
                raise BatchError(
                    f"prompt {self._waiting[0].prompt_index} has no room in the cache: other sequences hold its "
                    "blocks or slots",
                    "finish or close the other generate() of this runner, or raise cache.num_tokens (or num_sequences)",
                )
        going = []
        for each in self._running:
            if each.drawn < each.limit and not each.ended:
                going.append(each)
        if going and self._speculation is not None:
            return self._verify(self._speculation, going)
        return self._step(going) if going else self._read()

    def _admit(self) -> list[Request]:
        """Return the next prompts that fit into the cache, with their new tokens, and into one step."""
        runner, blocks = self._runner, self._blocks
        most = runner.backend.config.max_prefill_tokens
        admitted: list[Request] = []
        tokens = 0
        while self._waiting and len(self._running) < self._inputs.max_sequences:
            first = self._waiting[0]
            # The last token always runs, for its logits.
            if self._awaits_its_leader(first):
                break
            shared = [] if runner.prefixes is None else runner.prefixes.reuse(first.identities[:-1])
            cached = len(shared) * runner.spec.block_size
            tokens += first.length - cached
            joins = not admitted or tokens <= most
            needed = runner.spec.blocks_for(first.length + first.limit + self._spare) - len(shared)
            has_slot = not runner.slots.needed or runner.slots.num_free >= runner.model.batch_type.saves
            own = blocks.take(needed) if joins and has_slot else None
            if own is None:
                blocks.give_back(shared)
                break
            first.blocks, first.cached = shared + own, cached
            first.slots = (runner.slots.take(runner.model.batch_type.saves) or []) if runner.slots.needed else []
            slot, *spare = first.slots or (None,)
            if runner.prefixes is not None and cached and slot is not None:
                runner.prefixes.load_states(first.identities[:cached], slot)
            adapter = NO_ADAPTER if first.loaded is None else first.loaded.slot
            first.row = self._inputs.add(
                first.tokens, first.blocks, cached=cached, slot=slot, spare_slots=spare, adapter=adapter
            )
            admitted.append(self._waiting.popleft())
            self._running.append(first)
        return admitted

    def _awaits_its_leader(self, request: Request) -> bool:
        leader = None if self._runner.prefixes is None else request.leader
        return leader is not None and leader in self._running and not leader.has_generated

    def _step(self, sequences: list[Request]) -> list[tuple[Request, Token]]:
        """Start a step of sequences, in the order of their rows, and return tokens that became known."""
        runner, inputs, plain = self._runner, self._inputs, all(map(_plain, sequences))
        with runner.running():  # Open until the logits are read: they may be a graph's.
            if not sequences[0].drawn:
                self._run_to_places(sequences)
            counts = None if sequences[0].drawn else [each.length - each.cached for each in sequences]
            starts = [] if self._speculation is None else [each.first_new for each in sequences]
            rows = None if len(sequences) == len(self._running) else list(map(_row, sequences))
            batch = inputs.batch(counts, rows=rows, **{} if plain else self._fields(sequences, counts))
            output = runner.step(batch)
            logits = output.logits
            inputs.advance(counts, rows=rows)
            if counts is not None:
                self._show(sequences, counts, output)
            for each in sequences:
                each.unread += 1
            found = self._read()  # During the step. Masks need these tokens.
            if runner.prefixes is not None:
                for each in sequences:
                    self._save_states(each, len(each.tokens))
            wrong = logits.amax(-1).isnan()
            chosen = ops.greedy_sample(logits) if plain else self._chooser.choose(list(map(Place, sequences)), logits)
            chosen.masked_fill_(wrong, 0)  # A next step may read it.
            if not plain:
                self._chooser.count(sequences, chosen)
            likely = () if plain else logprobs_of(logits, chosen, [each.params.logprobs for each in sequences])
            for each in sequences:
                each.drawn += 1
            self._unread = sequences, HostCopy(runner.backend, chosen, wrong, *likely)
            if not self._overlaps:
                found = self._read()
                if counts is None and self._speculation is not None:
                    ones = [1] * len(sequences)
                    self._speculation.drafter.ran(sequences, starts, ones, output, [0] * len(sequences))
                return found
            inputs.extend_pending(list(map(_row, sequences)), chosen)
        return found

    def _show(self, sequences: list[Request], counts: Sequence[int], output: StepOutput) -> None:
        """Show the drafter what a step of prompts computed."""
        if self._speculation is not None:
            self._speculation.drafter.ran(sequences, [each.cached for each in sequences], counts, output, None)

    def _verify(self, speculation: Speculation, sequences: list[Request]) -> list[tuple[Request, Token]]:
        """Run a step with drafted tokens, and return the new tokens of each sequence: the right ones, and one more."""
        runner, inputs = self._runner, self._inputs
        with runner.running():
            drafts, added = speculation.propose(sequences)
            if not any(added):
                alone = self._step(sequences)
                speculation.measured(drafts)
                return alone
            rows, counts = list(map(_row, sequences)), [1 + count for count in added]
            inputs.extend_drafts(rows, added, drafts.tokens)
            batch = inputs.batch(counts, rows=rows, **self._fields(sequences, counts))
            output = runner.step(batch, ALL)
            inputs.advance(counts, rows=rows)
            logits, plain = output.logits, all(map(_plain, sequences))
            wrong = logits.amax(-1).isnan()
            places = speculation.places(sequences, drafts, added)
            chosen = ops.greedy_sample(logits) if plain else self._chooser.choose(places, logits)
            asked = [each.request.params.logprobs for each in places]
            likely = () if plain else logprobs_of(logits, chosen, asked)
            on_device = (drafts.tokens,) if isinstance(drafts.tokens, Tensor) else ()
            copied = map(Tensor.tolist, HostCopy(runner.backend, chosen, wrong, *on_device, *likely).wait())
            known, nan, lists = next(copied), next(copied), next(copied) if on_device else drafts.tokens
            logprobs = read_logprobs(list(copied), asked)
            starts, rights = [each.first_new for each in sequences], list[int]()
            found: list[tuple[Request, Token]] = []
            for sequence, drafted, size in zip(sequences, lists, counts, strict=True):
                first = sum(counts[: len(rights)])
                right = speculation.accepted(drafted[: drafts.counts[len(rights)]], known[first : first + size])
                rights.append(right)
                self._check_numbers([sequence], [any(nan[first : first + right + 1])])
                before = len(sequence.tokens)
                for place in range(first, first + right + 1):
                    if not sequence.ended:
                        sequence.append(known[place])
                        sequence.drawn += 1
                        found.append((sequence, sequence.token(*logprobs[place])))
                for length in range(before, len(sequence.tokens)):
                    self._save_states(sequence, length)
                inputs.accept(sequence.row, before, known[first : first + right + 1])
            speculation.drafter.ran(sequences, starts, counts, output, rights)
            speculation.measured(drafts)
            if not plain:
                new = torch.tensor([token.token_id for _, token in found])
                self._chooser.count([request for request, _ in found], to_device(new, logits.device))
        return found

    def _run_to_places(self, sequences: list[Request]) -> None:
        """Run new prompts up to the last place where their states are saved, in a step to each place."""
        runner, inputs = self._runner, self._inputs
        if runner.prefixes is None:
            return
        places = {each.row: runner.prefixes.places(each.cached, each.length - 1) for each in sequences}
        while going := [each for each in sequences if places[each.row]]:
            rows, counts = [each.row for each in going], [places[each.row][0] - each.cached for each in going]
            output = runner.step(inputs.batch(counts, rows=rows, **self._fields(going, counts)), NONE)
            inputs.advance(counts, rows=rows)
            self._show(going, counts, output)
            for each in going:
                each.cached = places[each.row].pop(0)
                self._save_states(each, each.cached)

    def _save_states(self, sequence: Request, length: int) -> None:
        """Save the states of a sequence after its first ``length`` tokens, which ran last, at one of the places."""
        prefixes = self._runner.prefixes
        if prefixes is not None and sequence.slots and prefixes.places(length - 1, length):
            prefixes.save_states(
                sequence.blocks, sequence.identities[:length], self._inputs.slot_after(sequence.row, length)
            )

    def _fields(self, sequences: list[Request], counts: Sequence[int] | None) -> dict[str, Any]:
        """Return the fields of a step's batch that its prompts' inputs determine."""
        new, starts = counts or [1] * len(sequences), [each.first_new for each in sequences]
        return step_fields(self._runner, [each.inputs for each in sequences], starts, new)

    def _read(self) -> list[tuple[Request, Token]]:
        """Return the tokens of the last step, in the order of the prompts. Waits for it.

        Raises:
            NumericsError: its logits have a NaN.
        """
        if self._unread is None:
            return []
        (sequences, copy), self._unread = self._unread, None
        chosen, wrong, *likely = map(Tensor.tolist, copy.wait())
        if any(wrong):
            self._check_numbers(sequences, wrong)
        self._inputs.extend_each(list(map(_row, sequences)), chosen)
        logprobs = read_logprobs(likely, [each.params.logprobs for each in sequences]) if likely else None
        found = []
        for place, sequence in enumerate(sequences):
            sequence.unread -= 1
            if not sequence.ended:
                if not sequence.has_generated:  # Its prompt is in the cache. A failure of the device has been raised.
                    self._remember(sequence)
                sequence.append(chosen[place])
                found.append((sequence, sequence.token(*logprobs[place] if logprobs else ())))
        return found

    @staticmethod
    def _check_numbers(sequences: Sequence[Request], wrong: Sequence[bool]) -> None:
        """Raise NumericsError if a sequence that goes on has wrong logits."""
        if bad := [each for each, nan in zip(sequences, wrong, strict=True) if nan and not each.ended]:
            raise NumericsError(
                f"the model gave NaN logits for prompt {', '.join(str(each.prompt_index) for each in bad)}",
                "check the weights; float16 overflows where bfloat16 and float32 do not (dtype in the config, --dtype)",
            )

    def _release(self, sequence: Request) -> None:
        """Free what a finished sequence holds. The last row takes the place of its row."""
        self._inputs.remove(sequence.row)
        last = self._running.pop()
        if last is not sequence:
            self._running[sequence.row], last.row = last, sequence.row
        self._remember(sequence)
        self._give_back(sequence)
        self._chooser.remove(sequence)
        if self._speculation is not None:
            self._speculation.drafter.end(sequence)

    def _remember(self, sequence: Request) -> None:
        """Let later prompts reuse the tokens in the cache: all but the last chosen one, which has not run."""
        if self._runner.prefixes is not None:
            tokens = sequence.identities[:-1] if sequence.has_generated else sequence.identities
            if self._speculation is not None:
                tokens = tokens[: self._speculation.drafter.remembered(sequence)]
            self._runner.prefixes.remember(sequence.blocks, tokens)

    def _give_back(self, sequence: Request) -> None:
        self._blocks.give_back(sequence.blocks)
        self._return_adapter(sequence)
        if not self._runner.closed:  # Tokens that nobody asks for may outlive the runner.
            self._runner.slots.give_back(sequence.slots)

    @staticmethod
    def _return_adapter(request: Request) -> None:
        if request.loaded is not None:
            request.loaded.give_back()

    @property
    def _blocks(self) -> BlockAllocator | PrefixCache:
        return self._runner.prefixes or self._runner.blocks
