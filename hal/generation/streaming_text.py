"""Streaming detokenization."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from os.path import commonprefix
from typing import Literal

import attrs
from tokenizers import Tokenizer

from hal.generation.request import Token


class TextStream:
    """The text of one prompt's new tokens, without special tokens.

    A token may hold part of a character, and its text may depend on the token before it. Text is therefore held back
    until its last character is complete, and decoded together with the preceding tokens.

    Args:
        tokenizer: the model's tokenizer.
        prompt: the token ids before the new ones.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._context = list(prompt)
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        """Add a token, and return the text that it completes, which may be empty."""
        self._held.append(token_id)
        text = self._held_text()
        if not text or text.endswith("\N{REPLACEMENT CHARACTER}"):  # The last character is incomplete.
            return ""
        self._context, self._held = self._held, []
        return text

    def flush(self) -> str:
        """Return the text still held back. Incomplete characters read as U+FFFD."""
        text, self._held = self._held_text(), []
        return text

    def _held_text(self) -> str:
        before: str = self._tokenizer.decode(self._context)
        together: str = self._tokenizer.decode(self._context + self._held)
        # A context that ends inside a character reads as U+FFFD there; the new tokens may complete the character.
        return together[len(commonprefix((before, together))) :]  # noqa: RUF071 - a prefix of characters, not of paths


@attrs.frozen
class Piece:
    """The text that one token adds.

    Attributes:
        prompt_index: the index of the prompt.
        text: the added text, which may be empty.
        token_id: the token.
        finished: for the text's last piece, the reason, as in :class:`hal.generation.request.Token`; else None.
    """

    prompt_index: int
    text: str
    token_id: int
    finished: Literal["stop", "length"] | None


def texts_in_order(tokens: Iterable[Token], prompts: Sequence[Sequence[int]], tokenizer: Tokenizer) -> Iterator[Piece]:
    """Yield the texts of :func:`hal.generate` one after another, in a piece per token. Stop tokens add no text.

    The first unfinished text is yielded as its tokens arrive. Later texts are buffered until their turn.

    Args:
        tokens: the iterator of :func:`hal.generate`.
        prompts: its prompts, as token ids.
        tokenizer: the model's tokenizer.
    """
    streams = [TextStream(tokenizer, prompt) for prompt in prompts]
    waiting: list[deque[Piece]] = [deque() for _ in prompts]
    turn = 0
    for token in tokens:
        stream = streams[token.prompt_index]
        text = "" if token.finished == "stop" else stream.push(token.token_id)
        if token.finished:
            text += stream.flush()
        waiting[token.prompt_index].append(Piece(token.prompt_index, text, token.token_id, token.finished))
        while turn < len(prompts) and waiting[turn]:
            piece = waiting[turn].popleft()
            turn += piece.finished is not None
            yield piece
