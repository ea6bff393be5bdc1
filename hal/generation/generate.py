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
from hal.device.group import Group
from hal.errors import BatchError, ConfigError, NumericsError
from hal.execution.runner import Runner
from hal.generation.penalties import PenaltyTable, has_penalties
from hal.generation.sampling_params import SamplingParams, choose, rows_of_nan
from hal.generation.token_masks import allowed_tokens
from hal.parallel.heartbeat import Heartbeat
from hal.parallel.host_values import gather_values
from hal.step import Batch
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
    prompt_index: int
    tokens: list[int]
    params: SamplingParams
    limit: int
    blocks: list[int] = attrs.field(factory=list)
    slots: list[int] = attrs.field(factory=list)
    cached: int = 0
    new: int = 0
    penalties: int | None = None
    """The row in the table of penalties, from the first step on."""

    @property
    def generated(self) -> list[int]:
        return self.tokens[len(self.tokens) - self.new :]


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
    return _run(runner, waiting) if data.size == 1 else _run_share(runner, waiting, data)


def _run_share(runner: Runner, prompts: Iterable[_Sequence], data: Group) -> Iterator[Token]:
    """Run this data rank's share of the prompts, and yield the tokens of all."""
    mine = deque(each for each in prompts if each.prompt_index % data.size == data.rank)
    hosts = runner.backend.mesh.hosts
    if runner.backend.lockstep:
        found = list(_run(runner, mine))
        while runner.idle():
            pass
    else:
        with Heartbeat(hosts):
            found = list(_run(runner, mine))
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
    return _Sequence(index, prompt, params, limit)


def _run(runner: Runner, waiting: deque[_Sequence]) -> Iterator[Token]:
    running: list[_Sequence] = []
    penalized = any(has_penalties(each.params) for each in waiting)
    table = PenaltyTable(runner.model.vocab_size, runner.backend.device.torch) if penalized else None
    try:
        while waiting or running:
            admitted = _admit(runner, waiting)
            running += admitted
            if admitted:
                batch = runner.batch(
                    [each.tokens[each.cached :] for each in admitted],
                    [each.blocks for each in admitted],
                    cached=[each.cached for each in admitted],
                    **_slots(runner, admitted),
                )
                chosen = _step(runner, admitted, batch, table)
                _remember(runner, admitted)  # After the step, which surfaces failures of the device.
                yield from _append(admitted, chosen)
            elif not running:
                raise BatchError(
                    f"prompt {waiting[0].prompt_index} has no room in the cache: "
                    "other sequences hold its blocks or slots",
                    "finish or close the other generate() of this runner, or raise cache.num_tokens (or num_sequences)",
                )
            running = _without_finished(running, runner, table)
            if running:
                cached = [len(each.tokens) - 1 for each in running]
                last = [each.tokens[-1:] for each in running]
                blocks = [each.blocks for each in running]
                batch = runner.batch(last, blocks, cached=cached, **_slots(runner, running))
                yield from _append(running, _step(runner, running, batch, table))
                running = _without_finished(running, runner, table)
    finally:
        for sequence in running:  # The caller may stop early.
            _give_back(runner, sequence)


def _give_back(runner: Runner, sequence: _Sequence) -> None:
    _blocks(runner).give_back(sequence.blocks)
    if not runner.closed:  # Tokens that nobody asks for may outlive the runner.
        runner.slots.give_back(sequence.slots)


def _slots(runner: Runner, sequences: list[_Sequence]) -> dict[str, Any]:
    """Return the ``slots`` field of a batch, if the model keeps a state per sequence."""
    return {"slots": [slot for each in sequences for slot in each.slots]} if runner.slots.needed else {}


def _blocks(runner: Runner) -> BlockAllocator | PrefixCache:
    return runner.prefixes or runner.blocks


def _remember(runner: Runner, sequences: list[_Sequence]) -> None:
    """Let later prompts reuse the cached tokens: all but the last chosen one, which has not run yet."""
    if runner.prefixes is not None:
        for each in sequences:
            runner.prefixes.remember(each.blocks, each.tokens[:-1] if each.new else each.tokens)


def _admit(runner: Runner, waiting: deque[_Sequence]) -> list[_Sequence]:
    """Return the next prompts that fit into the cache, with their new tokens, and into one step."""
    most = runner.backend.config.max_prefill_tokens
    admitted: list[_Sequence] = []
    tokens = 0
    while waiting:
        first = waiting[0]
        # The last token always runs, for its logits.
        shared = [] if runner.prefixes is None else runner.prefixes.reuse(first.tokens[:-1])
        cached = len(shared) * runner.spec.block_size
        tokens += len(first.tokens) - cached
        joins = not admitted or tokens <= most
        needed = runner.spec.blocks_for(len(first.tokens) + first.limit) - len(shared)
        has_slot = not runner.slots.needed or runner.slots.num_free > 0
        blocks = _blocks(runner).take(needed) if joins and has_slot else None
        if blocks is None:
            _blocks(runner).give_back(shared)
            break
        first.blocks, first.cached = shared + blocks, cached
        first.slots = (runner.slots.take(1) or []) if runner.slots.needed else []
        admitted.append(waiting.popleft())
    return admitted


def _step(runner: Runner, sequences: list[_Sequence], batch: Batch, table: PenaltyTable | None) -> list[int]:
    with runner.uses:  # The runner stays open until the logits are read: they may lie in a graph's memory.
        return _choose(runner, sequences, runner.step(batch).logits, table)


def _choose(runner: Runner, sequences: list[_Sequence], logits: Tensor, table: PenaltyTable | None) -> list[int]:
    """Return the next token of each sequence. Waits for the step, and raises NumericsError for a NaN."""
    params = [each.params for each in sequences]
    # Before the wait, so that masks are computed during the step.
    allowed = None
    if any(each.mask is not None for each in params):
        generated = [each.generated for each in sequences]
        allowed = allowed_tokens([each.prompt_index for each in sequences], params, generated, logits.shape[-1])
    with runner.backend.translating_errors(), torch.inference_mode():
        if wrong := rows_of_nan(logits):
            raise NumericsError(
                f"the model gave NaN logits for prompt {', '.join(str(sequences[row].prompt_index) for row in wrong)}",
                "check the weights; float16 overflows where bfloat16 and float32 do not (dtype in the config, --dtype)",
            )
        rows = [] if table is None else [_row(table, each) for each in sequences]
        if table is not None and any(rows):
            logits = table.penalize(logits, rows)
        if allowed is not None:
            logits = ops.mask_logits(logits, allowed.to(logits.device))
        chosen = choose(logits, params, [each.new for each in sequences])
        if table is not None and any(rows):
            table.count(chosen)
        return chosen.tolist()


def _row(table: PenaltyTable, sequence: _Sequence) -> int:
    if sequence.penalties is None:
        sequence.penalties = table.add(sequence.tokens, sequence.params)
    return sequence.penalties


def _append(sequences: list[_Sequence], chosen: list[int]) -> Iterator[Token]:
    for sequence, token in zip(sequences, chosen, strict=True):
        sequence.tokens.append(token)
        sequence.new += 1
        yield Token(sequence.prompt_index, token, _finished(sequence))


def _finished(sequence: _Sequence) -> Literal["stop", "length"] | None:
    if sequence.tokens[-1] in sequence.params.stop_token_ids:
        return "stop"
    return "length" if sequence.new == sequence.limit else None


def _without_finished(running: list[_Sequence], runner: Runner, table: PenaltyTable | None) -> list[_Sequence]:
    finished = [sequence for sequence in running if _finished(sequence)]
    _remember(runner, finished)
    for sequence in finished:
        _give_back(runner, sequence)
        if table is not None and sequence.penalties is not None:
            table.remove(sequence.penalties)
    return [sequence for sequence in running if not _finished(sequence)]
