"""The JSON of answers: texts, pieces of streams, single tokens with their log-probabilities."""

from __future__ import annotations

import json
import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from functools import cache
from string import ascii_letters
from typing import Any

import attrs
from tokenizers import Tokenizer

from hal.generation.generate import Piece
from hal.serve.request_fields import SentTensor

JSON = dict[str, Any]
json_text = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
"""Writes JSON without spaces."""


def usage(prompt_tokens: int, completion_tokens: int) -> JSON:
    """Return the numbers of tokens of an answer."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


class Answer(ABC):
    """The answer to one request for texts.

    Args:
        n: the number of texts of each prompt.
        tokens: the texts of tokens, if log-probabilities are asked for; else None.
        record: the names of what texts have of the model's choices.
    """

    prefix: str
    kind: str
    chunk_kind: str

    def __init__(self, model: str, n: int, tokens: TokenText | None, record: Collection[str] = ()) -> None:
        self._head = {"id": f"{self.prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._chunk_head = json_text({**self._head, "object": self.chunk_kind}).removesuffix("}")
        self._n = n
        self._tokens, self._record = tokens, record
        self._sent: dict[int, int] = {}  # the characters of each text that is streamed

    def whole(self, pieces: Sequence[Piece], used: JSON) -> JSON:
        """Return the answer of all pieces."""
        texts: dict[int, list[Piece]] = {}
        for each in pieces:
            texts.setdefault(self._index(each), []).append(each)
        choices = [
            {
                "index": index,
                "finish_reason": found[-1].finished,
                "logprobs": self._logprobs(found, 0),
                **self._content("".join(each.text for each in found)),
                **self._recorded(found[-1]),
            }
            for index, found in sorted(texts.items())
        ]
        return {**self._head, "object": self.kind, "choices": choices, "usage": used}

    def chunk(self, *pieces: Piece, with_usage: bool = False) -> str | None:
        """Return the event of a stream for pieces of a text, as JSON; None if they add nothing."""
        text, finished, index = "".join(each.text for each in pieces), pieces[-1].finished, self._index(pieces[0])
        if not (text or finished or self._tokens):
            return None
        choice = {
            "index": index,
            "finish_reason": finished,
            "logprobs": self._logprobs(pieces, self._sent.get(index, 0)),
            **self._delta(text, first=index not in self._sent),
            **self._recorded(pieces[-1]),
        }
        self._sent[index] = self._sent.get(index, 0) + len(text)
        return self._event(json_text(choice), ',"usage":null' if with_usage else "")

    def last_chunk(self, used: JSON) -> str:
        """Return the event with the numbers of tokens."""
        return self._event("", f',"usage":{json_text(used)}')

    def _event(self, choice: str, more: str) -> str:
        return f'{self._chunk_head},"choices":[{choice}]{more}}}'

    def _recorded(self, last: Piece) -> JSON:
        found = {name: last.choices[name] for name in self._record if name in last.choices}
        return {"recorded": {name: attrs.asdict(SentTensor.of(each)) for name, each in found.items()}} if found else {}

    def _index(self, piece: Piece) -> int:
        return piece.prompt_index * self._n + piece.sample_index

    @abstractmethod
    def _content(self, text: str) -> JSON:
        """Return the fields of a choice with its whole text."""

    @abstractmethod
    def _delta(self, text: str, *, first: bool) -> JSON:
        """Return the fields of a choice with a part of its text, ``first`` or later."""

    @abstractmethod
    def _logprobs(self, pieces: Sequence[Piece], offset: int) -> JSON | None:
        """Return the log-probabilities of pieces whose text begins at ``offset``, or None if none are asked for."""


class CompletionAnswer(Answer):
    """The answer to a request that continues prompts."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def _content(self, text: str) -> JSON:
        return {"text": text}

    def _delta(self, text: str, *, first: bool) -> JSON:
        return {"text": text}

    def _logprobs(self, pieces: Sequence[Piece], offset: int) -> JSON | None:
        if self._tokens is None:
            return None
        offsets = [offset + sum(len(each.text) for each in pieces[:place]) for place in range(len(pieces))]
        return {
            "tokens": [self._tokens.text(each.token_id) for each in pieces],
            "token_logprobs": [_finite(each.logprob) for each in pieces],
            "top_logprobs": [self._likely(self._tokens, each) for each in pieces],
            "text_offset": offsets,
        }

    @staticmethod
    def _likely(tokens: TokenText, piece: Piece) -> dict[str, float | None] | None:
        """Return the most likely tokens and the chosen one, by text; None for a token that nothing precedes.

        Of tokens with the same text, the chosen one, or else the most likely, has it. The others have their ids.
        """
        if piece.logprob is None:
            return None
        logprobs = {**dict(piece.top_logprobs), piece.token_id: piece.logprob}
        names: dict[str, int] = {}
        for token in (piece.token_id, *logprobs):
            names.setdefault(tokens.text(token), token)
        named = {token: text for text, token in names.items()}
        return {named.get(token, f"token_id:{token}"): _finite(value) for token, value in logprobs.items()}


class ChatAnswer(Answer):
    """The answer to a request that answers a conversation."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _content(self, text: str) -> JSON:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _delta(self, text: str, *, first: bool) -> JSON:
        return {"delta": {**({"role": "assistant"} if first else {}), "content": text}}

    def _logprobs(self, pieces: Sequence[Piece], offset: int) -> JSON | None:
        if self._tokens is None:
            return None
        content = [
            {
                **self._token(each.token_id, each.logprob),
                "top_logprobs": [self._token(token, logprob) for token, logprob in each.top_logprobs],
            }
            for each in pieces
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float | None) -> JSON:
        assert self._tokens is not None
        text, spelled = self._tokens.text(token_id), self._tokens.bytes(token_id)
        return {"token": text, "logprob": _finite(logprob), "bytes": spelled}


def _finite(logprob: float | None) -> float | None:
    """Return a log-probability. JSON has no infinity, in whose place OpenAI's API has -9999."""
    return None if logprob is None else max(logprob, -9999.0)


BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""A token of SentencePiece that is one byte."""
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class TokenText:
    """The text of single tokens, as in the middle of a text. Decoders drop the space of a token that begins one.

    Threading: any thread.
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
