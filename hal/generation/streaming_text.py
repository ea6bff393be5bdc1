"""From tokens to text, as they come."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from os.path import commonprefix
from typing import Literal

import attrs
from tokenizers import Tokenizer

from hal.generation.generate import Token


class TextStream:
    """The text of one prompt's new tokens, without special tokens.

    A token may hold a part of a character, and what a token reads as may depend on the one before it. So text is held
    back until its last character is whole, and decoded together with the tokens before it.

    Args:
        tokenizer: of the model.
        prompt: the token ids that the new ones follow.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._context = list(prompt)
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        """Add a token; return the text that it completes, which may be empty."""
        self._held.append(token_id)
        text = self._held_text()
        if not text or text.endswith("\N{REPLACEMENT CHARACTER}"):  # nothing to see yet, or a character's first bytes
            return ""
        self._context, self._held = self._held, []
        return text

    def flush(self) -> str:
        """What is still held back; bytes that never became a character read as U+FFFD."""
        text, self._held = self._held_text(), []
        return text

    def _held_text(self) -> str:
        before: str = self._tokenizer.decode(self._context)
        together: str = self._tokenizer.decode(self._context + self._held)
        # Context that ends inside a character reads as U+FFFD there, which the new tokens may turn into the character.
        return together[len(commonprefix((before, together))) :]  # noqa: RUF071 - of characters, which are no path's


@attrs.frozen
class Piece:
    """What one token adds to a text.

    Attributes:
        prompt: which prompt the text continues.
        text: what it adds, which may be empty.
        finished: None, or why it is the text's last piece, as in :class:`hal.generation.generate.Token`.
    """

    prompt: int
    text: str
    finished: Literal["stop", "length"] | None


def texts_in_order(tokens: Iterable[Token], prompts: Sequence[Sequence[int]], tokenizer: Tokenizer) -> Iterator[Piece]:
    """The texts that :func:`hal.generate` makes, one after another: one piece a token, stop tokens without text.

    The first unfinished text comes as its tokens do; later ones are kept until it is their turn.

    Args:
        tokens: what :func:`hal.generate` yields.
        prompts: the prompts it was given, as token ids.
        tokenizer: of the model.
    """
    streams = [TextStream(tokenizer, prompt) for prompt in prompts]
    waiting: list[deque[Piece]] = [deque() for _ in prompts]
    turn = 0
    for token in tokens:
        stream = streams[token.prompt]
        text = "" if token.finished == "stop" else stream.push(token.token_id)
        if token.finished:
            text += stream.flush()
        waiting[token.prompt].append(Piece(token.prompt, text, token.finished))
        while turn < len(prompts) and waiting[turn]:
            piece = waiting[turn].popleft()
            turn += piece.finished is not None
            yield piece
