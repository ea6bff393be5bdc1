"""The text of new tokens: complete characters, up to a stop text."""

from __future__ import annotations

from collections.abc import Sequence
from os.path import commonprefix

from tokenizers import Tokenizer

from hal.generation.sampling_params import SamplingParams


class TextStream:
    """The text of one prompt's new tokens, without special tokens.

    A token may hold part of a character, and its text may depend on the token before it. Text is therefore held back
    until its last character is complete, and decoded together with the preceding tokens.

    Args:
        prompt: the token ids before the new ones.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._context = list(prompt)
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        """Add a token, and return the text that it completes, which may be empty."""
        self._held.append(token_id)
        before, text = self._held_text()
        if not text or text.endswith("\N{REPLACEMENT CHARACTER}"):  # The last character is incomplete.
            return ""
        # A context that begins inside a character would spoil the next one.
        whole = not before.endswith("\N{REPLACEMENT CHARACTER}")
        self._context, self._held = self._held if whole else self._context + self._held, []
        return text

    def flush(self) -> str:
        """Return the text still held back. Incomplete characters read as U+FFFD."""
        (_, text), self._held = self._held_text(), []
        return text

    def _held_text(self) -> tuple[str, str]:
        """Return the text of the context, and what the held tokens add."""
        before: str = self._tokenizer.decode(self._context)
        together: str = self._tokenizer.decode(self._context + self._held)
        if together.startswith(before):
            return before, together[len(before) :]
        # A context that ends inside a character reads as U+FFFD there; the new tokens complete the character.
        return before, together[len(commonprefix((before, together))) :]  # noqa: RUF071 - of characters, not of paths


class StopText:
    """Text up to a stop text. What could be the beginning of one is held back.

    Args:
        stops: the texts that end the text.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.stopped: str | None = None

    def push(self, text: str) -> str:
        """Add text, and return what comes before a stop text."""
        if self.stopped is not None:
            return ""
        text = self._held + text
        if found := [(place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]:
            place, self.stopped = min(found)
            self._held = ""
            return text[:place]
        held = max((self._beginning(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """Return the text still held back."""
        text, self._held = self._held, ""
        return text

    @staticmethod
    def _beginning(text: str, stop: str) -> int:
        """Return the length of the longest end of ``text`` that begins ``stop``."""
        return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)


class GeneratedText:
    """The text of one prompt's new tokens, up to a stop text.

    Args:
        prompt: the token ids before the new ones.
        params: its ``stop`` ends the text, after ``min_new_tokens`` tokens.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], params: SamplingParams) -> None:
        self._stream = TextStream(tokenizer, prompt)
        self._ending = StopText(params.stop)
        self._free = params.min_new_tokens
        self._stop_ids = params.stop_token_ids | special_stops(tokenizer, params)

    @property
    def stopped(self) -> str | None:
        """The stop text that ended the text."""
        return self._ending.stopped

    def push(self, token_id: int, *, last: bool = False) -> str:
        """Add a token, and return the text that it completes, which may be empty. Stop tokens add none.

        Args:
            last: whether no further token follows.
        """
        self._free -= 1
        text = "" if token_id in self._stop_ids else self._stream.push(token_id)
        if last:
            text += self._stream.flush()
        if self._free > 0:
            return text
        text = self._ending.push(text)
        return text + self._ending.flush() if last else text


def special_stops(tokenizer: Tokenizer, params: SamplingParams) -> frozenset[int]:
    """Return the special tokens among the stop texts, which no text has."""
    if not params.stop:
        return frozenset()
    return frozenset(
        index
        for index, token in tokenizer.get_added_tokens_decoder().items()
        if token.special and token.content in params.stop
    )
