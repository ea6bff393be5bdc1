"""Sampling parameters of a prompt, from which options of commands and fields of requests derive."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from hal.config.bounds import SEQUENCES
from hal.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor  # The command's options do without torch.

GRAMMARS = ("json_schema", "regex")
"""The names of the parameters that are grammars."""
IN_TEXT = ("stop", "bad_words", *GRAMMARS)
"""The names of the parameters that need a tokenizer."""
WITHOUT_EFFECT = ("top_k", "top_p", "min_p", "seed")
"""The names of the parameters without effect at temperature 0."""
MAX_LOGPROBS = 1000
"""The most likely tokens that a request may ask for."""

Mask = Callable[[Sequence[int]], "Tensor"]
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


RECOMMENDED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""The names of the parameters that generation_config.json may recommend."""
OPTION = "option"
"""The key of the metadata of a parameter that has an option: its help."""


def _number(
    default: float | None, low: float, high: float, wanted: str, option: str = "", *, above: bool = False
) -> Any:
    """Return the attribute of a number from ``low`` to ``high``, or ``above`` the former, of the default's type."""

    def check(params: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value is None is default:
            return
        kinds = (int, float) if type(default) is float else (int,)
        if type(value) not in kinds:
            raise _wrong(attribute.name, f"{value!r}, not {'a number' if float in kinds else 'an integer'}")
        if not low <= value <= high or (above and value == low) or value == math.inf:
            raise _wrong(attribute.name, f"{value}, out of its range", f"give {wanted}")

    return attrs.field(default=default, validator=check, metadata={OPTION: option})


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

    max_new_tokens: int = _number(128, 1, math.inf, "1 or more")
    temperature: float = _number(0.0, 0, math.inf, "0 or more, and finite", "0 selects the most likely token.")
    top_k: int = _number(
        0, -1, 2**31 - 1, "0 (keeps all) to 2**31 - 1", "Keep only the TOP_K most likely tokens; 0 and -1 keep all."
    )
    top_p: float = _number(
        1.0,
        0,
        1,
        "more than 0, and at most 1 (keeps all)",
        "Keep the most likely tokens whose probabilities sum to this value.",
        above=True,
    )
    min_p: float = _number(
        0.0, 0, 1, "0 (keeps all) to 1", "Keep tokens with at least this fraction of the highest probability."
    )
    seed: int = _number(0, -(2**63), 2**63 - 1, "an integer of 64 bits: -2**63 to 2**63 - 1")
    stop_token_ids: frozenset[int] = attrs.field(default=frozenset(), converter=_token_ids)
    repetition_penalty: float = _number(
        1.0,
        0,
        math.inf,
        "more than 0, and finite; 1 for none",
        "Divide positive logits of the prompt's and the new tokens, multiply others; 1 for none.",
        above=True,
    )
    frequency_penalty: float = _number(
        0.0,
        -2,
        2,
        "-2 to 2; 0 for none",
        "Subtracted from a token's logit for each time that it was generated; -2 to 2.",
    )
    presence_penalty: float = _number(
        0.0, -2, 2, "-2 to 2; 0 for none", "Subtracted from the logit of a token that was generated; -2 to 2."
    )
    mask: Mask | None = None
    stop: tuple[str, ...] = attrs.field(default=(), converter=_texts)
    ignore_eos: bool = False
    min_new_tokens: int = _number(0, 0, math.inf, "0 to max_new_tokens")
    logit_bias: Mapping[int, float] = attrs.field(factory=dict, converter=_biases)
    bad_words: tuple[str, ...] = attrs.field(default=(), converter=_texts)
    logprobs: int | None = _number(None, 0, MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}")
    prompt_logprobs: int | None = _number(None, 0, MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}")
    json_schema: str | None = attrs.field(default=None, converter=_schema)
    regex: str | None = None
    n: int = _number(1, 1, SEQUENCES, f"1 to {SEQUENCES}")

    def __attrs_post_init__(self) -> None:
        if type(self.ignore_eos) is not bool:
            raise _wrong("ignore_eos", f"{self.ignore_eos!r:.70}, not True or False")
        self._check_grammar()
        for name in ("stop", "bad_words"):
            if not all(isinstance(each, str) and each for each in getattr(self, name)):
                raise _wrong(
                    name, f"{getattr(self, name)!r:.70}", "give a text, or a list of texts, none of them empty"
                )
        if self.mask is not None and not callable(self.mask):
            raise _wrong(
                "mask",
                f"{self.mask!r:.70}, which cannot be called",
                "give a function of the tokens generated so far, which returns the tokens allowed next",
            )
        if self.min_new_tokens > self.max_new_tokens:
            raise _wrong("min_new_tokens", f"{self.min_new_tokens}, out of its range", "give 0 to max_new_tokens")

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


OPTIONS = {each.name: each.metadata[OPTION] for each in attrs.fields(SamplingParams) if each.metadata.get(OPTION)}
"""The help of parameters that have an option, and a field in requests, of the same name."""
FIELDS = {name: name for name in (*OPTIONS, "seed", "stop_token_ids", "ignore_eos", "bad_words", "n")}
FIELDS["min_new_tokens"] = "min_tokens"
"""The fields of parameters in requests. The others are read otherwise."""
