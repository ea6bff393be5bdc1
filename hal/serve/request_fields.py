"""The fields of requests, and the errors of requests in the form of OpenAI's API.

A field that hal does not have is an error, unless it has the value that asks for nothing.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeVar

import attrs
import torch
from torch import Tensor

from hal.config import parse_json, read
from hal.errors import AsleepError, BatchError, CheckpointError, ClosedError, ConfigError, HalError, ModelError
from hal.generation.sampling_params import FIELDS, GRAMMARS, SamplingParams

INVALID, FAILED = "invalid_request_error", "server_error"


class ApiError(HalError):
    """A request that is not answered.

    Args:
        problem: what was asked, and what is wrong with it.
        param: the name of the request's field.
        code: a word for programs.
    """

    def __init__(
        self, status: int, problem: str, remedy: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(problem, remedy)
        self.status = status
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        """The answer's JSON."""
        kind = INVALID if self.status < 500 else FAILED
        message = f"{self.problem}: {self.remedy}"
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}


def refused(error: HalError, fields: Mapping[str, str] = MappingProxyType({})) -> ApiError:
    """Return the error for what a check of the request raised.

    Args:
        fields: the request's fields for parameters of another name.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, BatchError | CheckpointError | ConfigError | ModelError):
        field = error.key if error.key is None else fields.get(error.key, error.key)
        problem = error.problem if field == error.key else f"{field}: {error.problem}"
        return ApiError(400, problem, error.remedy, param=field)
    return failed(error)


def failed(error: HalError) -> ApiError:
    """Return the error for what running the request raised. Only a grammar may turn out to be wrong then."""
    if isinstance(error, ApiError):
        return error
    status = 503 if isinstance(error, AsleepError | ClosedError) else 400 if error.key in GRAMMARS else 500
    return ApiError(status, error.problem, error.remedy)


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
    """The grammar of the text."""

    json: Any = None
    regex: str | None = None


@attrs.frozen
class SentTensor:
    """A tensor of integers in JSON.

    Attributes:
        dtype: its name in torch.
        data: its bytes in base64.
    """

    shape: tuple[int, ...]
    dtype: Literal["uint8", "int16", "int32", "int64"]
    data: str

    @classmethod
    def of(cls, tensor: Tensor) -> SentTensor:
        """Return what stands for a tensor on the CPU."""
        name: Any = str(tensor.dtype).removeprefix("torch.")
        return cls(tuple(tensor.shape), name, base64.b64encode(tensor.numpy().tobytes()).decode())

    def tensor(self) -> Tensor:
        """Return the tensor.

        Raises:
            ValueError: the data is not base64, or not of this shape and dtype.
        """
        data = bytearray(base64.b64decode(self.data, validate=True))
        found: Tensor = torch.tensor(data, dtype=torch.uint8).view(getattr(torch, self.dtype))
        if math.prod(self.shape) != found.numel() or min(self.shape, default=0) < 0:
            raise ValueError(f"it has {found.numel()} numbers, and the shape is {list(self.shape)}")
        return found.view(self.shape)


@attrs.frozen(kw_only=True)
class Request:
    """The fields of every request."""

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
    record: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class CompletionRequest(TextRequest):
    """The fields of a request that continues prompts."""

    unsupported: ClassVar[Neutral] = {**OF_TEXTS, **OF_COMPLETIONS}

    prompt: Any
    echo: bool = False
    max_tokens: int = 16
    logprobs: int | None = None
    replay: tuple[dict[str, SentTensor], ...] = ()


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
