"""Sampling parameters of a prompt, and the choice of tokens from logits."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from hal import ops
from hal.config.bounds import SEQUENCES
from hal.errors import ConfigError
from hal.step.host_copies import to_device

PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
"""The names of the penalties, in the order in which they apply."""
GRAMMARS = ("json_schema", "regex")
"""The names of the parameters that are grammars."""
IN_TEXT = ("stop", "bad_words", *GRAMMARS)
"""The names of the parameters that need a tokenizer."""
MAX_LOGPROBS = 1000
"""The most likely tokens that a request may ask for."""

Mask = Callable[[Sequence[int]], Tensor]
"""Return which tokens are allowed next, given those generated so far."""


def _texts(values: str | Iterable[str]) -> tuple[str, ...]:
    return (values,) if isinstance(values, str) else tuple(values) if isinstance(values, Iterable) else (values,)


def _biases(values: Any) -> Mapping[int, float]:
    try:
        found = {operator.index(token): float(bias) for token, bias in dict(values).items()}
        if all(math.isfinite(bias) for bias in found.values()):
            return found
    except (TypeError, ValueError):
        pass
    raise ConfigError(
        f"logit_bias is {values!r:.70}", "give finite numbers by token id, such as {42: -3.5}", key="logit_bias"
    )


def _token_ids(values: Iterable[int]) -> frozenset[int]:
    try:
        return frozenset(map(operator.index, values))
    except TypeError:
        raise ConfigError(
            f"stop_token_ids is {values!r:.70}", "give token ids, such as {0}", key="stop_token_ids"
        ) from None


def _schema(value: Any) -> str | None:
    """Return a JSON schema as text."""
    try:
        found = value if value is None or isinstance(value, str) else json.dumps(value)
        if found is None or isinstance(json.loads(found), dict):
            return found
    except (TypeError, ValueError, RecursionError):
        pass
    raise ConfigError(
        f"json_schema is {value!r:.70}",
        'give a JSON schema, such as {"type": "object"}, or its text',
        key="json_schema",
    )


@attrs.frozen
class SamplingParams:
    """The sampling parameters of one prompt; see :func:`hal.ops.sample`.

    Attributes:
        max_new_tokens: the most new tokens; 1 or more.
        temperature: finite, 0 or more; 0 takes the most likely token.
        top_k: keep the ``top_k`` most likely tokens; 1 to 2**31 - 1. 0 and -1 keep all.
        top_p: keep the most likely tokens that together reach this probability; above 0, and at most 1 (keeps all).
        min_p: keep tokens at least this fraction as likely as the most likely; 0 (keeps all) to 1.
        seed: the prompt's seed, any integer of 64 bits; equal seeds give equal tokens in any batch. Where parameters
            are given by name, as in :meth:`hal.LLM.generate`, -1 is no seed, as in vLLM and llama.cpp.
        stop_token_ids: tokens that end the text. The stop token is yielded as the last token.
        repetition_penalty: divides a positive logit of a token that the prompt or the new text has, and multiplies
            another; above 0, and finite; 1 changes nothing. See :func:`hal.ops.penalize` for all three penalties.
        frequency_penalty: subtracted from a token's logit for each time that it was generated; -2 to 2.
        presence_penalty: subtracted from the logit of a token that was generated; -2 to 2.
        mask: called before each new token, with those generated so far. It returns which tokens are allowed next: int32
            ``[words]`` on the CPU, a row of ``allowed`` of :func:`hal.ops.mask_logits`. Ranks that share a prompt each
            call it, and must get the same result.
        stop: texts that end the text, which is cut before them. One that is a special token of the tokenizer is
            compared with tokens, others with the text. Needs a tokenizer.
        ignore_eos: :class:`hal.LLM` does not add the checkpoint's stop tokens.
        min_new_tokens: the fewest new tokens; 0 or more. Until then, stop tokens are not drawn, and the text is not
            compared with ``stop``.
        logit_bias: added to the logits of tokens, by token id.
        bad_words: texts that are not generated, neither at the beginning of a word nor behind a space. Needs a
            tokenizer.
        logprobs: return the log-probability of each new token, and of the ``logprobs`` most likely ones; None for
            neither. They are those of the model: nothing above changes them.
        prompt_logprobs: return those of the prompt's tokens; for :class:`hal.LLM`.
        json_schema: the text is JSON that follows this schema: a mapping, or its text. It may have less than the whole
            if ``max_new_tokens`` ends it. Needs a tokenizer, and the package llguidance.
        regex: the whole text matches this regular expression, in the syntax of Rust's package regex. Needs the same.
        n: the number of texts of the prompt, for :class:`hal.LLM`; text ``j`` uses ``seed + j``.

    Raises:
        ConfigError: a value has another type, or is out of its range.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: frozenset[int] = attrs.field(default=frozenset(), converter=_token_ids)
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    mask: Mask | None = None
    stop: tuple[str, ...] = attrs.field(default=(), converter=_texts)
    ignore_eos: bool = False
    min_new_tokens: int = 0
    logit_bias: Mapping[int, float] = attrs.field(factory=dict, converter=_biases)
    bad_words: tuple[str, ...] = attrs.field(default=(), converter=_texts)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    json_schema: str | None = attrs.field(default=None, converter=_schema)
    regex: str | None = None
    n: int = 1

    def __attrs_post_init__(self) -> None:
        if type(self.ignore_eos) is not bool:
            raise _wrong("ignore_eos", f"{self.ignore_eos!r:.70}, not True or False")
        self._check_grammar()
        for name in ("stop", "bad_words"):
            if not all(isinstance(each, str) and each for each in getattr(self, name)):
                raise _wrong(
                    name, f"{getattr(self, name)!r:.70}", "give a text, or a list of texts, none of them empty"
                )
        asked = [name for name in ("logprobs", "prompt_logprobs") if getattr(self, name) is not None]
        for name in ("max_new_tokens", "top_k", "seed", "min_new_tokens", "n", *asked):
            if type(getattr(self, name)) is not int:
                raise _wrong(name, f"{getattr(self, name)!r}, not an integer")
        for name in ("temperature", "top_p", "min_p", *PENALTIES):
            if type(getattr(self, name)) not in (int, float):
                raise _wrong(name, f"{getattr(self, name)!r}, not a number")
        if self.mask is not None and not callable(self.mask):
            raise _wrong(
                "mask",
                f"{self.mask!r:.70}, which cannot be called",
                "give a function of the tokens generated so far, which returns the tokens allowed next",
            )
        ranges = {
            "max_new_tokens": (self.max_new_tokens >= 1, "1 or more"),
            "temperature": (0 <= self.temperature < float("inf"), "0 or more, and finite"),
            "top_k": (-1 <= self.top_k < 2**31, "0 (keeps all) to 2**31 - 1"),
            "top_p": (0 < self.top_p <= 1, "more than 0, and at most 1 (keeps all)"),
            "min_p": (0 <= self.min_p <= 1, "0 (keeps all) to 1"),
            "repetition_penalty": (0 < self.repetition_penalty < float("inf"), "more than 0, and finite; 1 for none"),
            "frequency_penalty": (-2 <= self.frequency_penalty <= 2, "-2 to 2; 0 for none"),
            "presence_penalty": (-2 <= self.presence_penalty <= 2, "-2 to 2; 0 for none"),
            "seed": (-(2**63) <= self.seed < 2**63, "an integer of 64 bits: -2**63 to 2**63 - 1"),
            "min_new_tokens": (0 <= self.min_new_tokens <= self.max_new_tokens, "0 to max_new_tokens"),
            "n": (1 <= self.n <= SEQUENCES, f"1 to {SEQUENCES}"),
            **{name: (0 <= getattr(self, name) <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}") for name in asked},
        }
        for name, (fits, wanted) in ranges.items():
            if not fits:
                raise _wrong(name, f"{getattr(self, name)}, out of its range", f"give {wanted}")

    @property
    def in_text(self) -> list[str]:
        """The names of the given parameters that need a tokenizer."""
        return [name for name in IN_TEXT if getattr(self, name) not in ((), None)]

    @property
    def has_grammar(self) -> bool:
        """Whether the text follows a grammar."""
        return self.json_schema is not None or self.regex is not None

    def _check_grammar(self) -> None:
        if self.regex is not None and not isinstance(self.regex, str):
            raise _wrong("regex", f"{self.regex!r:.70}, not a text", "give a regular expression")
        given = [name for name in (*GRAMMARS, "mask") if getattr(self, name) is not None]
        # A stop token ends a text that follows its grammar, and the grammar may require a word.
        against = [name for name in ("ignore_eos", "min_new_tokens", "bad_words") if getattr(self, name)]
        if len(given) > 1 or (self.has_grammar and against):
            raise ConfigError(f"{' and '.join(given + against)} exclude each other", "give one of them", key=given[0])


def _wrong(name: str, found: str, remedy: str = "see hal.SamplingParams") -> ConfigError:
    return ConfigError(f"{name} is {found}", remedy, key=name)


def choose(logits: Tensor, params: Sequence[SamplingParams], drawn: Sequence[int]) -> Tensor:
    """Return the next token of each row.

    Args:
        logits: ``[batch, vocab_size]``, floating, free of NaN.
        params: one for each row.
        drawn: the number of tokens drawn for each row's prompt so far, which is the position in its random sequence.

    Returns:
        ``[batch]``, int64, on the logits' device.
    """
    if all(each.temperature == 0 for each in params):
        return ops.greedy_sample(logits)

    def column(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
        return to_device(torch.tensor(values, dtype=dtype), logits.device)

    return ops.sample(
        logits,
        column([each.temperature for each in params], torch.float32),
        column([max(0, each.top_k) for each in params], torch.int32),
        column([each.top_p for each in params], torch.float32),
        column([each.min_p for each in params], torch.float32),
        column([each.seed % 2**63 for each in params], torch.int64),
        column(list(drawn), torch.int64),
    )
