"""The prompts of a command: from its options and from a file, with their origins for errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from typing import BinaryIO, TypeVar

import attrs
import click

from hal.errors import BatchError

P = TypeVar("P", bound=Sized)
PROMPT = "A prompt, used verbatim. Repeatable."
PROMPTS_FILE = "A UTF-8 file with one prompt per line, used verbatim, after those of --prompt. - reads stdin."
STDIN = "<stdin>"
"""Python's name of the file."""


@attrs.frozen
class Prompts:
    """The prompts of a command, in order.

    Attributes:
        texts: the prompts.
        origins: where each comes from, as the subject of an error.
        stdin: what was read from stdin.
    """

    texts: list[str]
    origins: list[str]
    stdin: bytes | None

    @classmethod
    def read(cls, options: Sequence[str], file: BinaryIO | None) -> Prompts:
        """Return the prompts of ``--prompt`` and of ``--prompts-file``.

        Raises:
            UsageError: there are none.
            BatchError: one is not valid Unicode.
        """
        texts, origins, stdin = list(options), [f"prompt {index}" for index in range(len(options))], None
        if file is not None:
            content, name = file.read(), getattr(file, "name", STDIN)
            lines = _lines(content, name)
            texts += lines
            origins += [
                f"{name}, line {number}: prompt {len(options) + number - 1}" for number in range(1, len(lines) + 1)
            ]
            stdin = content if name == STDIN else None
        if not texts:
            raise click.UsageError("No prompt given: use --prompt, or --prompts-file with at least one line.")
        for text, origin in zip(texts, origins, strict=True):
            if any("\ud800" <= character <= "\udfff" for character in text):  # Python's encoding of invalid UTF-8
                raise BatchError(f"{origin} is not valid Unicode: {text!r:.70}", "give it in UTF-8")
        return cls(texts, origins, stdin)

    def encode(self, encode: Callable[[str], P]) -> list[P]:
        """Return the prompts that ``encode`` makes of the texts.

        Raises:
            BatchError: a prompt has no tokens.
        """
        encoded = list(map(encode, self.texts))
        for each, origin in zip(encoded, self.origins, strict=True):
            if not len(each):
                raise BatchError(f"{origin} is empty", "remove it, or write at least one character")
        return encoded


def _lines(content: bytes, name: str) -> list[str]:
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise BatchError(f"{name}, line {line} is not UTF-8: {error}", "save it as UTF-8") from None
    # Not splitlines: it also splits at form feeds and other characters that a prompt may contain.
    lines = text.removesuffix("\n").split("\n") if text else []
    return [line.removesuffix("\r") for line in lines]
