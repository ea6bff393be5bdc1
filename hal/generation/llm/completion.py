"""What generation gives: a completion of a prompt, and scores of given tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import attrs
from tokenizers import Tokenizer
from torch import Tensor

from hal.generation.generated_text import GeneratedText
from hal.generation.logits_processing import Logprob
from hal.generation.request import Request, Token


@attrs.frozen
class TokenLogprob:
    """The log-probability of a token, given those before it.

    Attributes:
        token_id: the token.
        logprob: its natural logarithm.
        top: the most likely tokens and their log-probabilities, in descending order.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@attrs.frozen
class Completion:
    """A text that continues a prompt.

    Attributes:
        text: the text, without special tokens and without the stop text.
        token_ids: the new tokens, with the stop token.
        finish_reason: ``stop``, for a stop token or text, or ``length``, if there was no room for more.
        prompt_index: the index of the prompt.
        sample_index: the index of the text among the ``n`` of its prompt.
        stop: the stop text that ended the text; None if none did.
        prompt_token_ids: the tokens of the prompt.
        logprobs: those of the new tokens, if ``logprobs`` asks for them.
        prompt_logprobs: those of the prompt's tokens from the second on, if ``prompt_logprobs`` asks for them.
        choices: what the model's layers chose for the tokens of the prompt and the new ones but the last, which has not
            run, if ``record`` of :class:`hal.LLM` says so: ``[tokens, layers, ...]`` of integers on the CPU, by name.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length"]
    prompt_index: int = 0
    sample_index: int = 0
    stop: str | None = None
    prompt_token_ids: tuple[int, ...] = attrs.field(default=(), repr=False)
    logprobs: tuple[TokenLogprob, ...] | None = attrs.field(default=None, repr=False)
    prompt_logprobs: tuple[TokenLogprob, ...] | None = attrs.field(default=None, repr=False)
    choices: Mapping[str, Tensor] = attrs.field(factory=dict, repr=False, eq=False)


@attrs.frozen
class Score:
    """How likely a model finds a continuation of a prompt.

    Attributes:
        tokens: the tokens of the continuation, with their log-probabilities.
    """

    tokens: tuple[TokenLogprob, ...]

    @property
    def logprob(self) -> float:
        """The log-probability of the whole continuation."""
        return sum(each.logprob for each in self.tokens)


def token_logprobs(token_ids: Sequence[int], logprobs: Sequence[Logprob]) -> tuple[TokenLogprob, ...]:
    """Return the log-probabilities of tokens, each with its token."""
    return tuple(
        TokenLogprob(token, logprob, top)
        for token, (logprob, top) in zip(token_ids, logprobs, strict=True)
        if logprob is not None
    )


def completion_of(
    request: Request,
    tokens: Sequence[Token],
    prompt_logprobs: Sequence[Logprob] | None,
    tokenizer: Tokenizer | None,
) -> Completion:
    """Return the completion of a request.

    Args:
        request: the request.
        tokens: all its new tokens.
        prompt_logprobs: the log-probabilities of the prompt's tokens from the second on; None for none.
        tokenizer: the model's; without one, the text is empty.
    """
    prompt, new, last = request.tokens[: request.length], tuple(each.token_id for each in tokens), tokens[-1]
    text = ""
    if tokenizer is not None:
        made = GeneratedText(tokenizer, prompt, request.params)
        text = "".join(made.push(each.token_id, last=each.finished is not None) for each in tokens)
    asked = request.params.logprobs is not None
    return Completion(
        text=text,
        token_ids=new,
        finish_reason=last.finished or "length",
        prompt_index=request.prompt_index,
        sample_index=request.sample_index,
        stop=last.stop,
        prompt_token_ids=tuple(prompt),
        logprobs=token_logprobs(new, [(each.logprob, each.top_logprobs) for each in tokens]) if asked else None,
        prompt_logprobs=None if prompt_logprobs is None else token_logprobs(prompt[1:], prompt_logprobs),
        choices=request.choices,
    )
