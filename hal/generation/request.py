"""A prompt with its new tokens, which a scheduler runs."""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import attrs
from tokenizers import Tokenizer
from torch import Tensor

from hal.checkpoint.adapters import Adapter, Adapters
from hal.errors import BatchError, ConfigError
from hal.execution.runner import Runner
from hal.generation.generated_text import GeneratedText, special_stops
from hal.generation.grammars import GrammarMask
from hal.generation.prompt_inputs import PromptInputs
from hal.generation.sampling_params import Mask, SamplingParams
from hal.nn import EncoderItem

log = logging.getLogger("hal.generation")


@attrs.frozen
class Token:
    """A new token of one prompt.

    Attributes:
        finished: for the prompt's last token, ``stop`` (a stop token or text) or ``length`` (no room for more); else
            None.
        stop: for the prompt's last token, the text of ``SamplingParams.stop`` that it completes; else None.
        logprob: its log-probability, if ``SamplingParams.logprobs`` is set.
        top_logprobs: the most likely tokens and their log-probabilities, in descending order.
    """

    prompt_index: int
    token_id: int
    finished: Literal["stop", "length"] | None
    stop: str | None = None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@attrs.define(eq=False)
class Request:
    """A prompt and its new tokens.

    Attributes:
        tokens: the prompt, and the new tokens that the host knows.
        number: its number in a serving loop.
        sample_index: the index of the text among those of its prompt.
        cached: the tokens of the prompt that the cache already holds.
        unread: how many of those the host does not know.
        row: its row in the input batch.
        penalties: its row in the table of penalties, from the first step on.
        cancelled: whether its tokens are no longer wanted.
        finished: the reason why the text ended, once its last token is known.
        stops: the tokens that end the text.
        bad: sequences of tokens that are not generated.
        text: the text of the new tokens, if the request has stop texts.
        mask: returns which tokens are allowed next.
        leader: a request of the same prompt, whose prompt is to be in the cache first.
        inputs: the inputs of the prompt beside its tokens; None for text alone.
        plain: whether each next token is the likeliest, whatever the other parameters, without images or a mask.
        adapter: the name of its adapter; None for none.
        loaded: that adapter, from the first step on.
        choices: what the model's layers chose for its tokens but the last, once it has ended, if the model records it.
    """

    prompt_index: int
    tokens: list[int]
    params: SamplingParams
    length: int
    limit: int
    number: int = -1
    sample_index: int = 0
    blocks: list[int] = attrs.field(factory=list)
    slots: list[int] = attrs.field(factory=list)
    cached: int = 0
    drawn: int = 0
    unread: int = 0
    row: int = -1
    penalties: int | None = None
    cancelled: bool = False
    finished: Literal["stop", "length"] | None = None
    stops: frozenset[int] = frozenset()
    bad: tuple[tuple[int, ...], ...] = ()
    text: GeneratedText | None = None
    mask: Mask | None = None
    leader: Request | None = None
    inputs: PromptInputs | None = None
    plain: bool = False
    adapter: str | None = None
    loaded: Adapter | None = None
    choices: Mapping[str, Tensor] = attrs.field(factory=dict)

    @property
    def identities(self) -> list[int]:
        """The tokens, in which placeholders of inputs differ by their content, and the first one by the adapter."""
        found = self.tokens if self.inputs is None else self.inputs.identities(self.tokens)
        return found if self.loaded is None else [self.loaded.identity(found[0]), *found[1:]]

    @property
    def first_new(self) -> int:
        """The position of the first token of its next step."""
        return self.length + self.drawn - 1 if self.drawn else self.cached

    @property
    def has_generated(self) -> bool:
        """Whether the host knows a new token."""
        return len(self.tokens) > self.length

    @property
    def generated(self) -> list[int]:
        """A copy of the new tokens that the host knows."""
        return self.tokens[self.length :]

    def append(self, token_id: int) -> None:
        """Add a new token."""
        self.tokens.append(token_id)
        if self.text is not None:
            self.text.push(token_id)
        if token_id in self.stops or (self.text is not None and self.text.stopped is not None):
            self.finished = "stop"
        elif len(self.tokens) == self.length + self.limit:
            self.finished = "length"

    def token(self, logprob: float | None = None, top: tuple[tuple[int, float], ...] = ()) -> Token:
        """Return the last new token."""
        stop = None if self.text is None else self.text.stopped
        return Token(self.prompt_index, self.tokens[-1], self.finished, stop, logprob, top)

    @property
    def ended(self) -> bool:
        """Whether no further token is wanted."""
        return self.cancelled or self.finished is not None


@attrs.frozen
class Place:
    """A place of a text for which a token is chosen: a request's next one, or one behind drafted tokens.

    Attributes:
        drafted: the drafted tokens before it.
    """

    request: Request
    drafted: tuple[int, ...] = ()

    @property
    def drawn(self) -> int:
        """The number of new tokens before it."""
        return self.request.drawn + len(self.drafted)

    @property
    def generated(self) -> list[int]:
        """A copy of the new tokens before it that the host knows."""
        return [*self.request.generated, *self.drafted]


def checked(
    runner: Runner,
    index: int,
    tokens: Sequence[int],
    params: SamplingParams,
    *,
    tokenizer: Tokenizer | None = None,
    max_length: int | None = None,
    items: Sequence[EncoderItem] = (),
    adapter: str | None = None,
) -> Request:
    """Return the request of a prompt.

    Args:
        tokenizer: the model's; for stop texts, bad words and grammars.
        max_length: the most tokens of a request; None for the model's maximum.
        items: the images and other inputs of the prompt, in the order of their placeholders.
        adapter: the name of its adapter; None for none.

    Raises:
        BatchError: the prompt is empty, longer than the model or the cache, or has a token id out of range; or its
            placeholders are not those of the items.
        ModelError: there are items, and the model reads text alone.
        ConfigError: the parameters need a tokenizer, have a token id out of range, or a grammar that is invalid or not
            supported; or there is no such adapter.
    """
    try:
        given = list(tokens)
        if bool in map(type, given):
            raise TypeError
        prompt = list(map(operator.index, given))
    except TypeError:
        raise BatchError(f"prompt {index} is {tokens!r:.70}", "give each prompt as a list of token ids") from None
    longest, capacity = runner.model.max_length if max_length is None else max_length, runner.spec.num_tokens
    vocab_size = runner.model.vocab_size
    if not prompt:
        raise BatchError(f"prompt {index} is empty", "give it at least one token")
    if len(prompt) >= longest:
        raise BatchError(
            f"prompt {index} has {len(prompt)} tokens; with new tokens, the model takes at most {longest}",
            "shorten the prompt",
        )
    if not all(0 <= token < vocab_size for token in prompt):
        raise BatchError(
            f"prompt {index} has a token id out of the range 0 to {vocab_size - 1}",
            "use the tokenizer of the model",
        )
    if wrong := [token for token in params.logit_bias if not 0 <= token < vocab_size]:
        raise ConfigError(
            f"logit_bias of prompt {index} names token {wrong[0]}",
            f"use token ids from 0 to {vocab_size - 1}",
            key="logit_bias",
        )
    if tokenizer is None and (named := params.in_text):
        raise ConfigError(f"{named[0]} of prompt {index} is text, and there is no tokenizer", "pass tokenizer=")
    limit = min(params.max_new_tokens, longest - len(prompt))
    if limit < params.max_new_tokens:
        log.warning("prompt %d gets %d new tokens, not %d: the model's limit", index, limit, params.max_new_tokens)
    if len(prompt) + limit > capacity:
        raise BatchError(
            f"prompt {index} needs {len(prompt) + limit} tokens of cache, but the cache holds {capacity}",
            "raise cache.num_tokens, shorten the prompt, or ask for fewer new tokens",
        )
    if adapter is not None:
        adapters_of(runner).check(adapter)
    request = Request(index, prompt, params, len(prompt), limit, stops=params.stop_token_ids, mask=params.mask)
    request.adapter = adapter
    request.inputs = PromptInputs.of(runner, prompt, items)
    if tokenizer is not None and params.in_text:
        request.stops |= special_stops(tokenizer, params)
        request.text = GeneratedText(tokenizer, prompt, params) if params.stop else None
        request.bad = tuple(_spellings(tokenizer, params.bad_words))
        if params.has_grammar:
            request.mask = GrammarMask(tokenizer, params, vocab_size, request.stops)
    return request


def adapters_of(runner: Runner) -> Adapters:
    """Return the adapters of a runner's model.

    Raises:
        ConfigError: it has no room for any.
    """
    found = runner.model.adapters
    if not isinstance(found, Adapters):
        raise ConfigError(
            f"{type(runner.model).__name__} was loaded without room for adapters",
            "set adapters.slots, or pass adapters= to hal.LLM",
            key="adapters.slots",
        )
    return found


def _spellings(tokenizer: Tokenizer, words: Iterable[str]) -> Iterator[tuple[int, ...]]:
    """Yield the tokens of each word, at the beginning of a text and behind a space."""
    for word in words:
        found = {tuple(tokenizer.encode(text, add_special_tokens=False).ids) for text in (word, f" {word}")}
        yield from sorted(each for each in found if each)
