"""The fields of requests. One that hal does not have is an error, unless it has the value that asks for nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeVar

import attrs

from hal.config import parse_json, read
from hal.errors import ConfigError
from hal.generation.sampling_params import FIELDS, SamplingParams
from hal.serve.api_error import ApiError, refused

Neutral = Mapping[str, tuple[Any, ...]]

IGNORED = frozenset(
    {
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Fields that ask for nothing of an answer's text. They may have any value."""
OF_TEXTS: Neutral = {
    "best_of": (1,),
    "cache_prompt": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "mirostat": (0,),
    "priority": (0,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "typical_p": (1,),
    "use_beam_search": (False,),
}
"""Fields of OpenAI's API, vLLM and llama.cpp that hal does not have, and their values that ask for nothing."""
OF_COMPLETIONS: Neutral = {"add_special_tokens": (True,), "suffix": ("",)}
OF_CHATS: Neutral = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "audio": (),
    "continue_final_message": (False,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "web_search_options": (),
}
OF_EMBEDDINGS: Neutral = {"add_special_tokens": (True,), "dimensions": ()}
SURROGATE = re.compile(r"\\ud[89a-f]", re.IGNORECASE)

T = TypeVar("T", bound="Request")


@attrs.frozen
class StreamOptions:
    """Options of a stream.

    Attributes:
        include_usage: send the numbers of tokens at the end.
        continuous_usage_stats: they are not sent with each event.
        include_obfuscation: events are not padded.
    """

    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False
    include_obfuscation: Literal[False] = False


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

    unsupported: ClassVar[Neutral] = {}
    """Fields that hal does not have, and their values that ask for nothing."""

    model: str


@attrs.frozen(kw_only=True)
class EmbeddingRequest(Request):
    """The fields of a request for embeddings."""

    unsupported: ClassVar[Neutral] = OF_EMBEDDINGS

    input: Any
    encoding_format: str = "float"


def _sampling_fields() -> type:
    """Return a class with the fields of :class:`hal.SamplingParams`. None stands for the checkpoint's value."""
    kinds: dict[Any, Any] = {tuple: tuple[str, ...], frozenset: tuple[int, ...]}
    fields = {}
    for name, field in FIELDS.items():
        kind = type(getattr(attrs.fields(SamplingParams), name).default)
        fields[field] = attrs.field(type=kinds.get(kind, kind) | None, default=None)
    return attrs.make_class("SamplingFields", fields, (Request,), frozen=True, kw_only=True)


@attrs.frozen(kw_only=True)
class TextRequest(_sampling_fields()):  # type: ignore[misc]
    """The fields of every request for texts."""

    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = 1
    stop: Any = ()
    logit_bias: dict[str, float] | None = None
    structured_outputs: StructuredOutputs | None = None
    response_format: dict[str, Any] | None = None


@attrs.frozen(kw_only=True)
class CompletionRequest(TextRequest):
    """The fields of a request that continues prompts."""

    unsupported: ClassVar[Neutral] = {**OF_TEXTS, **OF_COMPLETIONS}

    prompt: Any
    echo: bool = False
    max_tokens: int = 16
    logprobs: int | None = None


@attrs.frozen(kw_only=True)
class ChatRequest(TextRequest):
    """The fields of a request that answers a conversation."""

    unsupported: ClassVar[Neutral] = {**OF_TEXTS, **OF_CHATS}

    messages: tuple[dict[str, Any], ...]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
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
        raise refused(error) from None
    for name in given.keys() & IGNORED:
        del given[name]
    for name, neutral in kind.unsupported.items():
        # In Python, True equals 1.
        if name in given and (type(given[name]) is bool, given[name]) not in [
            (type(each) is bool, each) for each in neutral
        ]:
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
        raise refused(error) from None
