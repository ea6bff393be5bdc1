"""What a request asks of the model: its prompts, sampling parameters, and the form of its answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import attrs
from tokenizers import Tokenizer
from torch import Tensor

from hal.errors import BatchError, HalError, UnknownKey
from hal.generation.generate import Piece
from hal.generation.generated_text import TextStream
from hal.generation.llm.chat_template import ARGUMENTS
from hal.generation.llm.language_model import LLM
from hal.generation.llm.messages import media_of
from hal.generation.llm.piece_stream import PieceStream
from hal.generation.llm.prompts import MultimodalPrompt, encoded_prompts, listed_prompts
from hal.generation.logits_processing import Logprob
from hal.generation.sampling_params import FIELDS, GRAMMARS
from hal.serve.answers import Answer, ChatAnswer, CompletionAnswer, TokenText
from hal.serve.request_fields import ApiError, ChatRequest, CompletionRequest, TextRequest, refused

EFFORT, USUAL_EFFORT = "reasoning_effort", "medium"
"""A variable of some chat templates, and its value that asks for nothing of the others."""
JSON_OBJECT: Mapping[str, Any] = {"type": "object"}


@attrs.frozen
class Job:
    """A request for texts that is ready to run.

    Attributes:
        stream: whether pieces are sent as they come.
        include_usage: whether a stream ends with the numbers of tokens.
        echo: the prompts, if the answer repeats them.
    """

    pieces: PieceStream
    answer: Answer
    count: int
    prompt_tokens: int
    stream: bool
    include_usage: bool
    echo: PromptEcho | None = None


def completion_job(llm: LLM, asked: CompletionRequest, most: int) -> Job:
    """Return the job of a request that continues prompts. It may take seconds, for long prompts.

    Args:
        most: the most texts of a request.

    Raises:
        ApiError: the request is invalid.
    """
    prompts = encoded(lambda given: encoded_prompts(given, lambda: llm.tokenizer), asked.prompt, "prompt")
    tokens = None if asked.logprobs is None else TokenText(llm.tokenizer)
    answer = CompletionAnswer(asked.model, asked.n, tokens, asked.record)
    sampling = {**_sampling(asked), "max_new_tokens": asked.max_tokens, "logprobs": asked.logprobs}
    alone = asked.echo and asked.max_tokens == 0
    choices = _choices(llm, asked, alone) if asked.replay else None
    if not asked.echo:
        return _job(llm, asked, prompts, sampling, answer, most)
    adapter = adapter_of(llm, asked.model)
    echo = PromptEcho(llm, asked.prompt, prompts, asked.n, asked.logprobs, alone, adapter, choices)
    if alone:
        sampling["max_new_tokens"] = 1
    return _job(llm, asked, prompts, sampling, answer, most, echo)


def _choices(llm: LLM, asked: CompletionRequest, alone: bool) -> list[dict[str, Tensor]]:
    """Return what the model's layers choose for the prompts of a request that generates nothing."""
    problem, remedy = None, "leave it out, or start the server with --replay"
    if not {name for each in asked.replay for name in each} <= {*llm.replayed}:
        names = ", ".join(sorted({name for each in asked.replay for name in each}))
        problem = f"replay has {names:.70}, and the server replays {', '.join(llm.replayed) or 'nothing'}"
    elif not alone:
        problem, remedy = "replay is given, and the request generates text", "set echo to true and max_tokens to 0"
    if problem is not None:
        raise ApiError(400, problem, remedy, param="replay")
    try:
        return [{name: sent.tensor() for name, sent in each.items()} for each in asked.replay]
    except (RuntimeError, ValueError) as error:
        remedy = "send what an answer has as recorded"
        raise ApiError(400, f"replay has no tensor: {error}", remedy, param="replay") from None


def chat_job(llm: LLM, asked: ChatRequest, most: int, switches: Mapping[str, Any]) -> Job:
    """Return the job of a request that answers a conversation, as :func:`completion_job` does.

    Args:
        most: the most texts of a request.
        switches: variables of the chat template that the request does not set.
    """
    if asked.tool_choice not in ("auto", "none"):
        raise ApiError(
            400,
            f"tool_choice is {asked.tool_choice!r:.70}, and hal serve has auto and none",
            "give one of them",
            param="tool_choice",
            code="unsupported_parameter",
        )
    tools = list(asked.tools) if asked.tool_choice == "auto" else []
    if tools and not asked.parallel_tool_calls:
        raise ApiError(
            400,
            "parallel_tool_calls is false, and hal serve does not limit the calls of a model",
            "leave it out",
            param="parallel_tool_calls",
            code="unsupported_parameter",
        )
    if asked.top_logprobs and not asked.logprobs:
        raise ApiError(400, "top_logprobs is given, and logprobs is not true", "give both", param="top_logprobs")
    if own := sorted(ARGUMENTS & asked.chat_template_kwargs.keys()):
        raise ApiError(400, f"chat_template_kwargs has {own[0]!r}", "leave it out", param="chat_template_kwargs")
    try:
        prompt = _chat_prompt(llm, asked, tools, switches)
    except HalError as error:
        raise refused(error) from error
    limits = [each for each in (asked.max_tokens, asked.max_completion_tokens) if each is not None]
    room = max(1, llm.max_length - len(prompt))  # If there is none, the prompt is refused.
    sampling = {**_sampling(asked), "max_new_tokens": min(limits, default=room)}
    if asked.logprobs:
        sampling["logprobs"] = asked.top_logprobs or 0
    tokens = TokenText(llm.tokenizer) if asked.logprobs else None
    return _job(llm, asked, [prompt], sampling, ChatAnswer(asked.model, asked.n, tokens, asked.record), most)


def _chat_prompt(
    llm: LLM, asked: ChatRequest, tools: list[dict[str, Any]], switches: Mapping[str, Any]
) -> list[int] | MultimodalPrompt:
    for index, kind, file in media_of(asked.messages):
        if not (isinstance(file, str) and file.startswith("data:")) and file is not None:  # Files are not read.
            raise ApiError(
                400,
                f"message {index} has the {kind} {file!r:.70}; hal serve takes images and videos as data URLs",
                f'give {{"type": "{kind}_url", "{kind}_url": {{"url": "data:..."}}}}',
                param="messages",
            )
    messages, effort = asked.messages, asked.reasoning_effort
    given = {EFFORT: effort} if effort is not None else {}
    try:
        return llm.chat_prompt(messages, tools=tools or None, **{**switches, **given, **asked.chat_template_kwargs})
    except UnknownKey as error:
        if error.key != EFFORT or effort != USUAL_EFFORT:
            raise
    return llm.chat_prompt(messages, tools=tools or None, **{**switches, **asked.chat_template_kwargs})


def adapter_of(llm: LLM, model: str) -> str | None:
    """Return the adapter that a request chooses by the name of its model; None for the model alone."""
    return model if model in llm.adapters else None


def encoded(encode: Callable[[Any], list[list[int]]], given: Any, param: str) -> list[list[int]]:
    """Return the token ids of the prompts in a field, as ``encode`` makes them.

    Raises:
        ApiError: they are no prompts, or there are none.
    """
    try:
        if prompts := encode(given):
            return prompts
    except (BatchError, TypeError):
        pass
    raise ApiError(400, f"{param} is {given!r:.70}", "give a text or its token ids, or a list of these", param=param)


def _job(
    llm: LLM,
    asked: TextRequest,
    prompts: Sequence[Sequence[int] | MultimodalPrompt],
    sampling: Mapping[str, Any],
    answer: Answer,
    most: int,
    echo: PromptEcho | None = None,
) -> Job:
    include_usage = asked.stream_options is not None and asked.stream_options.include_usage
    if include_usage and not asked.stream:
        raise ApiError(400, "stream_options is given, and stream is not true", "give both", param="stream_options")
    if (count := len(prompts) * asked.n) > most:
        raise ApiError(400, f"the request is for {count} texts, and the server takes {most}", "ask for fewer")
    alone = echo is not None and echo.alone
    if asked.record and (alone or not {*asked.record} <= {*llm.recorded}):
        known = "the model computes no text" if alone else f"the server records {', '.join(llm.recorded) or 'nothing'}"
        raise ApiError(
            400,
            f"record is {list(asked.record)!r:.70}, and {known}",
            "ask for tokens" if alone else "leave it out, or start the server with --record",
            param="record",
        )
    try:
        given = [] if alone else prompts
        pieces = llm.apieces(given, adapter=adapter_of(llm, asked.model), **sampling)
    except HalError as error:
        grammar = "structured_outputs" if asked.response_format is None else "response_format"
        raise refused(error, {**FIELDS, "max_new_tokens": "max_tokens", **dict.fromkeys(GRAMMARS, grammar)}) from error
    total = sum(map(len, prompts))
    return Job(pieces, answer, count, total, asked.stream, include_usage, echo)


def _sampling(asked: TextRequest) -> dict[str, Any]:
    """Return sampling parameters by name: those that are given."""
    found = {name: value for name, field in FIELDS.items() if (value := getattr(asked, field)) is not None}
    found["stop"] = asked.stop
    if asked.logit_bias is not None:
        found["logit_bias"] = _biases(asked.logit_bias)
    format_ = {} if asked.response_format is None else _response_format(asked.response_format)
    if (grammar := asked.structured_outputs) is not None:
        found |= {"json_schema": grammar.json, "regex": grammar.regex}
        if format_ and (grammar.json, grammar.regex) != (None, None):
            raise ApiError(
                400, "response_format and structured_outputs exclude each other", "give one", param="response_format"
            )
    return found | format_


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in given.items()}
    except ValueError as error:
        raise ApiError(400, f"logit_bias names no token: {error}", "use token ids", param="logit_bias") from None


def _response_format(given: Mapping[str, Any]) -> dict[str, Any]:
    match given:
        case {"type": "text", **others} if not others:
            return {}
        case {"type": "json_object", **others} if not others:
            return {"json_schema": JSON_OBJECT}
        case {"type": "json_schema", "json_schema": {"schema": schema}, **others} if not others:
            return {"json_schema": schema}
    raise ApiError(
        400,
        f"response_format is {given!r:.70}",
        'give {"type": "text"}, {"type": "json_object"}, or {"type": "json_schema", "json_schema": {"schema": ...}}',
        param="response_format",
    )


@attrs.frozen
class PromptEcho:
    """Prompts as pieces.

    Attributes:
        given: the prompts as the request has them: texts or token ids.
        prompts: their token ids.
        n: the number of texts of each prompt.
        top: how many of the most likely tokens each piece has; None for no log-probabilities.
        alone: whether nothing follows the prompt.
        choices: what the model's layers choose for each prompt; None for what they choose themselves.
    """

    llm: LLM
    given: Any
    prompts: Sequence[Sequence[int]]
    n: int
    top: int | None
    alone: bool
    adapter: str | None
    choices: Sequence[Mapping[str, Tensor]] | None

    async def pieces(self) -> list[list[Piece]]:
        """Return the pieces of each prompt, a piece for each token, for each of its texts.

        Raises:
            HalError: as :meth:`hal.LLM.aprompt_logprobs`.
        """
        if self.top is None and not self.alone:
            scores: list[list[Logprob]] = [[(None, ())] * (len(each) - 1) for each in self.prompts]
        else:  # They check the prompts, too, if nothing else does.
            scores = await self.llm.aprompt_logprobs(
                self.prompts, self.top or 0, adapter=self.adapter, choices=self.choices
            )
        found = []
        for index, (given, tokens, score) in enumerate(
            zip(listed_prompts(self.given), self.prompts, scores, strict=True)
        ):
            texts = _texts(self.llm.tokenizer, given, tokens)
            rows = list(zip(texts, tokens, [(None, ()), *score], strict=True))
            for sample in range(self.n):
                pieces = [Piece(index, text, token, None, sample, *logprob) for text, token, logprob in rows]
                if self.alone:
                    pieces[-1] = attrs.evolve(pieces[-1], finished="length")
                found.append(pieces)
        return found


def _texts(tokenizer: Tokenizer, given: str | Sequence[int], tokens: Sequence[int]) -> list[str]:
    """Return the text of each token of a prompt. Together they are the text that was given."""
    if isinstance(given, str):
        starts = [start for start, _ in tokenizer.encode(given).offsets]
        return [given[start:end] for start, end in pairwise([0, *accumulate(starts[1:], max), len(given)])]
    stream = TextStream(tokenizer)
    texts = [stream.push(each) for each in tokens]
    return [*texts[:-1], texts[-1] + stream.flush()]
