"""Single tokens as text and bytes, for log-probabilities."""

from __future__ import annotations

import re
from functools import cache
from string import ascii_letters

from tokenizers import Tokenizer

BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""A token of SentencePiece that is one byte."""
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class TokenText:
    """The text of single tokens, as in the middle of a text. Decoders drop the space of a token that begins one.

    Threading: any thread.

    Args:
        tokenizer: the model's.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = tokenizer.get_added_tokens_decoder()
        letters = (found for each in ascii_letters if (found := tokenizer.token_to_id(each)) is not None)
        self._before = [*letters][:1]
        self._begins = tokenizer.decode(self._before)

    def text(self, token_id: int) -> str:
        """Return a token's text. A part of a character reads as U+FFFD."""
        if token_id in self._added:
            return str(self._added[token_id].content)
        found: str = self._tokenizer.decode([*self._before, token_id], skip_special_tokens=False)
        return found.removeprefix(self._begins)

    def bytes(self, token_id: int) -> list[int] | None:
        """Return a token's bytes; None if they are not known."""
        text, written = self.text(token_id), self._tokenizer.id_to_token(token_id)
        if INCOMPLETE not in text or (written is not None and INCOMPLETE in written):
            return list(text.encode())
        if written is None:
            return None
        if found := BYTE.fullmatch(written):
            return [int(found[1], 16)]
        letters = _byte_letters()
        return [letters[each] for each in written] if all(each in letters for each in written) else None


@cache
def _byte_letters() -> dict[str, int]:
    """Return the letters with which byte-level BPE writes bytes, as GPT-2 does: a printable byte as itself, the others,
    in order, as the characters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [each for each in range(0x100) if each not in printable]
    return {chr(each): each for each in printable} | {chr(0x100 + place): each for place, each in enumerate(others)}
