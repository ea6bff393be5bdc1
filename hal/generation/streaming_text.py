"""The texts of several prompts, one after another."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import attrs
from tokenizers import Tokenizer

from hal.generation.generated_text import GeneratedText
from hal.generation.request import Token
from hal.generation.sampling_params import SamplingParams


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
    """

    prompt_index: int
    text: str
    token_id: int
    finished: Literal["stop", "length"] | None
    sample_index: int = 0
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


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
