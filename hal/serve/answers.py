"""The JSON of answers: texts, pieces of streams, log-probabilities, embeddings."""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from hal.generation.streaming_text import Piece
from hal.serve.token_text import TokenText

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
        model: the model's name.
        n: the number of texts of each prompt.
        tokens: the texts of tokens, if log-probabilities are asked for; else None.
    """

    prefix: str
    kind: str
    chunk_kind: str

    def __init__(self, model: str, n: int, tokens: TokenText | None) -> None:
        self._head = {"id": f"{self.prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._chunk_head = json_text({**self._head, "object": self.chunk_kind}).removesuffix("}")
        self._n = n
        self._tokens = tokens
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
        }
        self._sent[index] = self._sent.get(index, 0) + len(text)
        return self._event(json_text(choice), ',"usage":null' if with_usage else "")

    def last_chunk(self, used: JSON) -> str:
        """Return the event with the numbers of tokens."""
        return self._event("", f',"usage":{json_text(used)}')

    def _event(self, choice: str, more: str) -> str:
        return f'{self._chunk_head},"choices":[{choice}]{more}}}'

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
