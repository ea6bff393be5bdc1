"""Generation of many prompts at once, until each is finished, and their texts one after another."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import attrs
from tokenizers import Tokenizer
from torch import Tensor

from hal.config.bounds import SEQUENCES
from hal.device.group import Group
from hal.errors import BatchError, ConfigError
from hal.execution.runner import Runner
from hal.generation.drafting.speculation import Speculation
from hal.generation.generated_text import GeneratedText
from hal.generation.request import Request, Token, checked
from hal.generation.sampling_params import SamplingParams
from hal.generation.scheduler import Scheduler
from hal.nn import EncoderItem
from hal.parallel.host_values import Heartbeat, gather_values


@attrs.frozen
class Piece:
    """The text that one token adds.

    Attributes:
        prompt_index: the index of the prompt.
        text: the added text, which may be empty.
        token_id: the token.
        finished: for the text's last piece, the reason, as in :class:`hal.generation.request.Token`; else None.
        sample_index: the index of the text among those of its prompt.
        logprob: the token's log-probability, if ``SamplingParams.logprobs`` is set.
        top_logprobs: the most likely tokens and their log-probabilities, in descending order.
        choices: of the last piece, what the model recorded; see :class:`hal.Completion`.
    """

    prompt_index: int
    text: str
    token_id: int
    finished: Literal["stop", "length"] | None
    sample_index: int = 0
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    choices: Mapping[str, Tensor] = attrs.field(factory=dict, repr=False, eq=False)


def piece_of(token: Token, text: GeneratedText, sample_index: int = 0) -> Piece:
    """Add a token to its text, and return what it adds."""
    added = text.push(token.token_id, last=token.finished is not None)
    last = token.logprob, token.top_logprobs
    return Piece(token.prompt_index, added, token.token_id, token.finished, sample_index, *last)


def texts_in_order(
    tokens: Iterable[Token], prompts: Sequence[Sequence[int]], tokenizer: Tokenizer, params: Sequence[SamplingParams]
) -> Iterator[Piece]:
    """Yield the texts of :func:`hal.generate` one after another, in a piece per token. Stop tokens add no text.

    The first unfinished text is yielded as its tokens arrive. Later texts are buffered until their turn.

    Args:
        tokens: the iterator of :func:`hal.generate`.
        prompts: its prompts, as token ids.
        tokenizer: the model's tokenizer.
        params: those of each prompt.
    """
    streams = [GeneratedText(tokenizer, prompt, each) for prompt, each in zip(prompts, params, strict=True)]
    waiting: list[deque[Piece]] = [deque() for _ in prompts]
    turn = 0
    for token in tokens:
        waiting[token.prompt_index].append(piece_of(token, streams[token.prompt_index]))
        while turn < len(prompts) and waiting[turn]:
            piece = waiting[turn].popleft()
            turn += piece.finished is not None
            yield piece


def generate(
    runner: Runner,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    tokenizer: Tokenizer | None = None,
    *,
    items: Sequence[Sequence[EncoderItem]] | None = None,
    adapters: Sequence[str | None] | None = None,
    speculation: Speculation | None = None,
) -> Iterator[Token]:
    """Continue all ``prompts``, yielding the tokens of each step in the order of the prompts.

    A prompt starts as soon as the cache has room for all its tokens. Its tokens do not depend on the other prompts.

    With several data ranks, every rank passes the same prompts, and gets the tokens of all. The ranks share the
    prompts, and exchange the tokens when all are finished, however long the others take.

    Args:
        runner: runs the steps.
        prompts: the token ids of each prompt.
        params: one for all prompts, or one for each.
        tokenizer: the model's; for parameters that are texts.
        items: the images and other inputs of each prompt, in the order of their placeholders; None for texts alone.
        adapters: the name of each prompt's adapter in ``runner.model.adapters``, or None; None for no adapters.
        speculation: drafts tokens for the runner's model; None for no drafts.

    Raises:
        BatchError: a prompt is empty, longer than the model or the cache, or has a token id out of range. All prompts
            are checked before the first step. The placeholders of a prompt are not those of its items.
        ModelError: there are items, and the model reads text alone.
        ConfigError: ``params`` has another type, needs a tokenizer, or is for :class:`hal.LLM`; or a mask returns
            something else than its documentation says, or allows no token.
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
    for each in per_prompt:
        if each.n != 1 or each.prompt_logprobs is not None:
            name = "prompt_logprobs" if each.n == 1 else "n"
            raise ConfigError(f"{name} is {getattr(each, name)}: hal.generate returns new tokens only", "use hal.LLM")
    if items is not None and len(items) != len(prompts):
        raise BatchError(
            f"got {len(prompts)} prompts and items of {len(items)}", "give a list of items for each prompt"
        )
    if adapters is not None and len(adapters) != len(prompts):
        raise BatchError(f"got {len(prompts)} prompts and {len(adapters)} adapters", "give one, or None, for each")
    of_prompt, named = items or [()] * len(prompts), adapters or [None] * len(prompts)
    requests = [
        checked(runner, index, prompt, wanted, tokenizer=tokenizer, items=own, adapter=adapter)
        for index, (prompt, wanted, own, adapter) in enumerate(zip(prompts, per_prompt, of_prompt, named, strict=True))
    ]
    data = runner.backend.mesh.data
    return _run(runner, requests, speculation) if data.size == 1 else _run_share(runner, requests, data)


def _run(runner: Runner, requests: Sequence[Request], speculation: Speculation | None = None) -> Iterator[Token]:
    scheduler = Scheduler(
        runner,
        max_requests=min(max(len(requests), 1), SEQUENCES),
        max_length=max((each.length + each.limit for each in requests), default=1),
        speculation=speculation,
    )
    try:
        for each in requests:
            scheduler.add(each)
    except ConfigError:
        scheduler.close()
        raise
    return _tokens(scheduler)


def _tokens(scheduler: Scheduler) -> Iterator[Token]:
    try:
        while not scheduler.idle:
            for _, token in scheduler.step():
                if isinstance(token, Exception):
                    raise token
                yield token
    finally:
        scheduler.close()  # The caller may stop early.


def _run_share(runner: Runner, requests: Iterable[Request], data: Group) -> Iterator[Token]:
    """Run this data rank's share of the prompts, and yield the tokens of all."""
    mine = [each for each in requests if each.prompt_index % data.size == data.rank]
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
