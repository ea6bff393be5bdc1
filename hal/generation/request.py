"""A prompt with its new tokens, which a scheduler runs."""

from __future__ import annotations

import logging
import operator
from collections.abc import Sequence
from typing import Literal

import attrs

from hal.errors import BatchError
from hal.execution.runner import Runner
from hal.generation.sampling_params import SamplingParams

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
class Request:
    """A prompt and its new tokens. :meth:`Scheduler.add` makes one.

    Attributes:
        tokens: the prompt, and the new tokens that the host knows.
        length: the length of the prompt.
        limit: the most new tokens.
        cached: the tokens of the prompt that the cache already holds.
        drawn: the number of tokens drawn.
        unread: how many of those the host does not know.
        row: its row in the input batch.
        penalties: its row in the table of penalties, from the first step on.
        cancelled: whether its tokens are no longer wanted.
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
    cancelled: bool = False

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.length :]

    @property
    def ended(self) -> bool:
        """Whether no further token is wanted."""
        return self.cancelled or self.finished is not None

    @property
    def finished(self) -> Literal["stop", "length"] | None:
        """The reason, if the last token is known."""
        if len(self.tokens) > self.length and self.tokens[-1] in self.params.stop_token_ids:
            return "stop"
        return "length" if len(self.tokens) == self.length + self.limit else None


def checked(runner: Runner, index: int, tokens: Sequence[int], params: SamplingParams) -> Request:
    """Return the request of a prompt.

    Raises:
        BatchError: the prompt is empty, longer than the model or the cache, or has a token id out of range.
    """
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
    return Request(index, prompt, params, len(prompt), limit)
