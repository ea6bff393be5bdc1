"""The fields of requests. One that hal does not have is an error, unless it has the value that asks for nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import attrs

from hal.config import parse_json, read
from hal.errors import ConfigError
from hal.serve.api_error import ApiError

IDENTIFIERS = frozenset({"user", "safety_identifier", "prompt_cache_key", "metadata"})
"""Fields that describe a request and ask for nothing. They may have any value."""
SURROGATE = re.compile(r"\\ud[89a-f]", re.IGNORECASE)

T = TypeVar("T", bound="Request")


@attrs.frozen
class StreamOptions:
    """Options of a stream.

    Attributes:
        include_usage: send the numbers of tokens at the end.
    """

    include_usage: bool = False


@attrs.frozen
class StructuredOutputs:
    """The grammar of the text.

    Attributes:
        json: a JSON schema.
        regex: a regular expression.
    """

    json: Any = None
    regex: str | None = None


@attrs.frozen(kw_only=True)
class Request:
    """The fields of every request.

    Attributes:
        model: the name of the model.
    """

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Fields that hal does not have, and their values that ask for nothing."""

    model: str


@attrs.frozen(kw_only=True)
class EmbeddingRequest(Request):
    """The fields of a request for embeddings."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"dimensions": ()}

    input: Any
    encoding_format: str = "float"


@attrs.frozen(kw_only=True)
class TextRequest(Request):
    """The fields of every request for texts: OpenAI's, then those of :class:`hal.SamplingParams` that OpenAI lacks."""

    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int = 1
    stop: Any = ()
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] | None = None
    structured_outputs: StructuredOutputs | None = None


@attrs.frozen(kw_only=True)
class CompletionRequest(TextRequest):
    """The fields of a request that continues prompts."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"best_of": (1,), "echo": (False,), "suffix": ("",)}

    prompt: Any
    max_tokens: int = 16
    logprobs: int | None = None


@attrs.frozen(kw_only=True)
class ChatRequest(TextRequest):
    """The fields of a request that answers a conversation."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "audio": (),
        "function_call": ("none",),
        "functions": ([],),
        "modalities": (["text"],),
        "parallel_tool_calls": (True,),
        "prediction": (),
        "reasoning_effort": (),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "verbosity": ("medium",),
        "web_search_options": (),
    }

    messages: tuple[dict[str, Any], ...]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: Any = "auto"
    chat_template_kwargs: dict[str, Any] = attrs.field(factory=dict)


def parse(kind: type[T], body: bytes) -> T:
    """Return the fields of a request. A field that is null counts as missing.

    Raises:
        ApiError: the body is not a JSON object in UTF-8, or a field is missing, unknown, not supported or invalid.
    """
    try:
        text = body.decode()
        given = {name: value for name, value in parse_json(text, "the body").items() if value is not None}
        if SURROGATE.search(text):  # Python reads the half of a pair as a character, which has no UTF-8.
            json.dumps(given, ensure_ascii=False).encode()
    except UnicodeError as error:
        raise ApiError(400, f"the body is not Unicode: {error}", "send JSON in UTF-8") from None
    except ConfigError as error:
        raise ApiError(400, error.problem, error.remedy) from None
    for name in given.keys() & IDENTIFIERS:
        del given[name]
    for name, neutral in kind.unsupported.items():
        if name in given and not any(type(given[name]) is type(each) and given[name] == each for each in neutral):
            raise ApiError(
                400,
                f"{name} is {given[name]!r:.70}, and hal serve does not support it",
                "leave it out",
                param=name,
                code="unsupported_parameter",
            )
        given.pop(name, None)
    try:
        return read(kind, given, "request")
    except ConfigError as error:
        named = re.search(r"unknown key '([^']*)'|required key '(\w+)'|@ request\.(\w+)", error.problem)
        param = next(filter(None, named.groups()), None) if named else None
        raise ApiError(400, error.problem, error.remedy, param=param) from None
