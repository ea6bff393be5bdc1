"""Tests for what a server refuses, in the form of OpenAI's errors, while it goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.api_server import ask, served
from openai import AuthenticationError, BadRequestError, NotFoundError, OpenAI, RateLimitError

import hal

COMPLETE, CHAT, EMBED = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"


@pytest.fixture(scope="module")
def llm(trained: Path) -> Iterator[hal.LLM]:
    with hal.LLM(
        trained, backend="cpu", max_sequences=2, max_length=200, config={"cache": {"num_tokens": 1024}}
    ) as made:
        yield made


@pytest.fixture(scope="module")
def url(llm: hal.LLM) -> Iterator[str]:
    with served(llm, max_texts=3, max_body=4096, api_key="secret") as address:
        yield address


def post(url: str, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content_Type": "application/json", "Authorization": "Bearer secret", **headers}
    return ask(url, "POST", path, data, **headers)[:2]


def said(part: dict[str, Any]) -> dict[str, Any]:
    """Return the messages of a request with one part."""
    return {"messages": [{"role": "user", "content": [part]}]}


@pytest.mark.parametrize(
    ("path", "fields", "param", "problem"),
    [
        (COMPLETE, {"temprature": 1}, "temprature", "unknown key 'temprature' (did you mean 'temperature'?"),
        (COMPLETE, {"temperature": "hot"}, "temperature", "expected float, found str 'hot'"),
        (COMPLETE, {"temperature": -1}, "temperature", "temperature is -1.0, out of its range"),
        (COMPLETE, {"max_tokens": 0}, "max_tokens", "max_tokens: max_new_tokens is 0, out of its range"),
        (COMPLETE, {"max_tokens": -1, "echo": True}, "max_tokens", "max_new_tokens is -1, out of its range"),
        (COMPLETE, {"max_tokens": 0, "echo": True, "prompt": "x " * 900}, None, "the model takes at most"),
        (COMPLETE, {"max_tokens": 0, "echo": True, "prompt": [[5], []]}, None, "prompt 1 is empty"),
        (COMPLETE, {"seed": 2**63}, "seed", "at most 64 bits"),
        (COMPLETE, {"max_tokens": True}, "max_tokens", "expected int, found bool"),
        (COMPLETE, {"n": 4}, None, "the request is for 4 texts, and the server takes 3"),
        (COMPLETE, {"n": 0}, "n", "n is 0, out of its range"),
        (COMPLETE, {"skip_special_tokens": False}, "skip_special_tokens", "hal serve does not support it"),
        (COMPLETE, {"best_of": 2}, "best_of", "hal serve does not support it"),
        (COMPLETE, {"prompt": {"a": 1}}, "prompt", "prompt is {'a': 1}"),
        (COMPLETE, {"prompt": []}, "prompt", "prompt is []"),
        (COMPLETE, {"prompt": [[]]}, None, "prompt 0 is empty"),
        (COMPLETE, {"prompt": [1 << 20]}, None, "token id out of the range"),
        (COMPLETE, {"prompt": "x " * 900}, None, "the model takes at most 200"),
        (COMPLETE, {"prompt": None}, "prompt", "required key 'prompt' is missing"),
        (COMPLETE, {"logit_bias": {"x": 1}}, "logit_bias", "logit_bias names no token"),
        (COMPLETE, {"logprobs": 5000}, "logprobs", "logprobs is 5000, out of its range"),
        (COMPLETE, {"stop": [""]}, "stop", "none of them empty"),
        (COMPLETE, {"stream_options": {"include_usage": True}}, "stream_options", "stream is not true"),
        (COMPLETE, {"structured_outputs": {"regex": "("}}, "structured_outputs", "regex is '('"),
        (COMPLETE, {"structured_outputs": {"choice": []}}, "structured_outputs", "unknown key 'choice'"),
        (COMPLETE, {"structured_outputs": {"json": {"$ref": "#"}}}, "structured_outputs", "no text goes on"),
        (
            COMPLETE,
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": []}}}},
            "response_format",
            "json_schema is",
        ),
        (
            COMPLETE,
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "response_format",
            "exclude each other",
        ),
        (COMPLETE, {"model": "gpt-4"}, "model", "there is no model 'gpt-4'"),
        (CHAT, {"messages": "hi"}, "messages", "expected a list"),
        (CHAT, {"messages": [{"role": "user", "content": "hi"}]}, None, "has no chat template"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "has a part"),
        (CHAT, said({"type": "image", "image": "/etc/hosts"}), "messages", "as data URLs"),
        (CHAT, said({"type": "image_url", "image_url": {"url": "/etc/hosts"}}), "messages", "as data URLs"),
        (CHAT, said({"type": "video_url", "video_url": {"url": "http://a/b.mp4"}}), "messages", "as data URLs"),
        (CHAT, said({"type": "image_url", "image_url": {"url": "data:,x"}}), None, "given: image"),
        (CHAT, said({"type": "video_url", "video_url": {"url": "data:,x"}}), None, "given: video"),
        (CHAT, {"tool_choice": "required"}, "tool_choice", "hal serve has auto and none"),
        (CHAT, {"parallel_tool_calls": False, "tools": [{}]}, "parallel_tool_calls", "does not limit the calls"),
        (CHAT, {"modalities": ["text", "audio"]}, "modalities", "hal serve does not support it"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs", "logprobs is not true"),
        (CHAT, {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "has 'tools'"),
        (EMBED, {"dimensions": 4}, "dimensions", "hal serve does not support it"),
        (EMBED, {"encoding_format": "int8"}, "encoding_format", "give float or base64"),
        (EMBED, {"input": ""}, None, "prompt 0 is empty"),
    ],
)
def test_fields(path: str, fields: dict[str, Any], param: str | None, problem: str, url: str) -> None:
    whole: dict[str, dict[str, Any]] = {
        COMPLETE: {"prompt": "x", "user": "me", "suffix": None, "best_of": 1},
        CHAT: {"messages": [{"role": "user", "content": "x"}], "parallel_tool_calls": True},
        EMBED: {"input": "x"},
    }
    status, answer = post(url, path, {"model": "tiny", **whole[path], **fields})
    error = answer["error"]
    assert status == (404 if "model" in fields else 400)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert problem in error["message"]


@pytest.mark.parametrize(
    ("body", "headers", "status", "problem"),
    [
        (b"{", {}, 400, "is not valid JSON"),
        (b"[1]", {}, 400, "must hold a JSON object"),
        (b"\xff", {}, 400, "is not Unicode"),
        (b'{"model": "tiny", "prompt": "\\ud800"}', {}, 400, "is not Unicode"),
        (b'{"model": "tiny", "prompt": "x", "prompt": "y"}', {}, 400, "duplicate keys: prompt"),
        (b'{"model": "tiny", "prompt": "x", "temperature": NaN}', {}, 400, "expected a finite number"),
        (b'{"model": "tiny", "prompt": ' + b"[" * 2000 + b"]" * 2000 + b"}", {}, 400, "maximum recursion depth"),
        (b" " * 5000, {}, 413, "the body has more than 4096 bytes"),
        (b"{}", {"Content_Type": "text/plain"}, 415, "the content type is 'text/plain'"),
        (b"{}", {"Authorization": "Bearer wrong"}, 401, "the API key is missing or wrong"),
        (b"{}", {"Authorization": ""}, 401, "the API key is missing or wrong"),
    ],
)
def test_bodies(body: bytes, headers: dict[str, str], status: int, problem: str, url: str) -> None:
    found, answer = post(url, COMPLETE, body, **headers)
    assert found == status, answer
    assert problem in answer["error"]["message"]
    good = post(url, COMPLETE, {"model": "tiny", "prompt": "x", "max_tokens": 1})
    assert good[0] == 200


def test_paths_and_methods(url: str) -> None:
    key = {"Authorization": "Bearer secret"}
    for method, path, status in (("GET", COMPLETE, 405), ("GET", "/v1/none", 404), ("GET", "/v1/models/none", 404)):
        found, answer, _ = ask(url, method, path, **key)
        assert (found, answer["error"]["type"]) == (status, "invalid_request_error")
    assert ask(url, "GET", "/v1/models")[0] == 401
    assert ask(url, "GET", "/health")[0] == ask(url, "GET", "/metrics")[0] == 200


def test_the_client_raises_its_errors(url: str) -> None:
    with OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as client:
        with pytest.raises(BadRequestError, match="temperature is"):
            client.completions.create(model="tiny", prompt="x", temperature=-1)
        with pytest.raises(NotFoundError, match="there is no model 'other'"):
            client.completions.create(model="other", prompt="x")
        with pytest.raises(AuthenticationError):
            client.with_options(api_key="wrong").models.list()


def test_more_texts_than_may_wait(url: str) -> None:
    with OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as client:
        events = client.completions.create(
            model="tiny", prompt="import ", max_tokens=190, n=3, stream=True, extra_body={"ignore_eos": True}
        )
        texts = [next(iter(events)).choices[0].text, "", ""]
        with pytest.raises(RateLimitError, match="3 texts run or wait, and the server takes 3") as caught:
            client.completions.create(model="tiny", prompt="x")
        assert caught.value.response.headers["retry-after"] == "1"
        for event in events:
            texts[event.choices[0].index] += event.choices[0].text
        assert texts[0] == texts[1] == texts[2], "the one that waited, too"
        assert client.completions.create(model="tiny", prompt="x", max_tokens=1).usage is not None
