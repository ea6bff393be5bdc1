"""Texts that follow a JSON schema or a regular expression, through the package llguidance."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from hal.config.optional_libraries import need
from hal.errors import ConfigError
from hal.generation.sampling_params import SamplingParams
from hal.ops.logits import WORD

WHITESPACE = r"[ \n]{1,8}"
"""What JSON may have between its parts. Unlimited, a model may write it until it has no more tokens."""

UNSUPPORTED = "correct it, or use what llguidance supports"
MOST_SHOWN = 300
"""The most characters of an error of llguidance that are shown."""


class GrammarMask:
    """A mask that allows what a grammar allows after the tokens so far: once per new token of one request.

    Args:
        params: their ``json_schema`` or ``regex`` is the grammar.
        vocab_size: the number of tokens of the model.
        stops: the tokens that end the text. They are allowed where the grammar may end, and nowhere else.

    Raises:
        ConfigError: llguidance is not installed, the grammar is invalid or not supported, no text follows it, or
            ``stops`` is empty.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, vocab_size: int, stops: frozenset[int]) -> None:
        name, text = ("regex", params.regex) if params.json_schema is None else ("json_schema", params.json_schema)
        if not stops:
            raise ConfigError(
                f"{name} needs a token that ends the text, and the checkpoint has none", "give one in stop_token_ids"
            )
        library, self._stops, self._read = need("llguidance", "grammars", name), stops, list[int]()
        self._name, self._shown = name, f"{name} is {text!r:.70}"
        vocabulary = _vocabulary(library, tokenizer, vocab_size)
        try:
            if name == "regex":
                grammar = library.LLMatcher.grammar_from_regex(text)
            else:
                grammar = library.LLMatcher.grammar_from_json_schema(text, {"whitespace_pattern": WHITESPACE})
        except ValueError as refusal:
            raise self._error(f": {refusal}", UNSUPPORTED) from None
        # A verbose error has the parser's whole state.
        limits = library.LLParserLimits(verbose_errors=False)
        self._matcher = library.LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
        self._end = vocabulary.eos_token
        self._words = -(-vocab_size // WORD)
        if error := self._matcher.get_error():
            raise self._error(f": {error}", UNSUPPORTED)
        self._first = self._allowed()

    def __call__(self, generated: Sequence[int]) -> Tensor:
        """Return the tokens that are allowed next. Tokens of an earlier call that are not given again are dropped.

        Raises:
            ConfigError: no text goes on, or the grammar is too complex for llguidance's limits.
        """
        if not generated:
            return self._first
        same = next(
            (at for at, pair in enumerate(zip(self._read, generated, strict=False)) if pair[0] != pair[1]), None
        )
        kept = min(len(self._read), len(generated)) if same is None else same
        self._matcher.rollback(len(self._read) - kept)
        self._matcher.consume_tokens(list(generated[kept:]))
        self._read = list(generated)
        return self._allowed()

    def _allowed(self) -> Tensor:
        allowed = torch.zeros(self._words, dtype=torch.int32)
        self._matcher.unsafe_compute_mask_ptr(allowed.data_ptr(), allowed.nbytes)
        error = self._matcher.get_error()
        words = allowed.numpy().view("uint32")
        ending = not error and self._matcher.is_accepting()
        for token in {self._end, *self._stops}:
            if token < self._words * WORD:
                bit = 1 << token % WORD
                if ending and token in self._stops:
                    words[token // WORD] |= bit
                else:
                    words[token // WORD] &= ~bit & 0xFFFFFFFF
        if error or not words.any():
            reason = f" (llguidance: {error.splitlines()[0]})" if error else ""
            raise self._error(
                f", and no text goes on after {len(self._read)} new tokens{reason}",
                "use a simpler grammar, whose texts all have an end",
            )
        return allowed

    def _error(self, problem: str, remedy: str) -> ConfigError:
        problem = " ".join(problem.split())
        return ConfigError(f"{self._shown}{problem[:MOST_SHOWN]}", remedy, key=self._name)


@functools.lru_cache(maxsize=4)
def _vocabulary(library: Any, tokenizer: Tokenizer, vocab_size: int) -> Any:
    """Return llguidance's form of a tokenizer, which takes a second to make for a large one."""
    return library.LLTokenizer(tokenizer.to_str(), n_vocab=vocab_size)
