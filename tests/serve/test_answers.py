"""Tests for what a server answers to the client of OpenAI's API: what hal.LLM gives."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from helpers.api_server import ask, metric, served
from helpers.checkpoints import with_template
from helpers.reference import TEXTS
from helpers.waiting import until
from openai import AsyncOpenAI, BadRequestError, OpenAI
from tokenizers import Tokenizer, decoders, models

import hal
from hal.generation.drafting.draft_length import Acceptance
from hal.generation.generate import Piece
from hal.generation.llm.serving_loop import Occupancy
from hal.serve import request_fields
from hal.serve.answers import ChatAnswer, CompletionAnswer, TokenText
from hal.serve.request_fields import SentTensor
from hal.serve.server_state import ServerMetrics

CONFIG = {"cache": {"block_size": 16, "num_tokens": 4096}}
MESSAGES: Any = [{"role": "system", "content": "s"}, {"role": "user", "content": "one"}]


@pytest.fixture(scope="module")
def llm(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[hal.LLM]:
    folder = with_template(trained, tmp_path_factory.mktemp("serve") / "model")
    with hal.LLM(
        folder, backend="cpu", dtype="float32", compiler="eager", max_sequences=8, max_length=160, config=CONFIG
    ) as made:
        yield made


@pytest.fixture(scope="module")
def url(llm: hal.LLM) -> Iterator[str]:
    with served(llm) as address:
        yield address


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_models(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny" == client.models.retrieve("tiny").id


@pytest.mark.shows("texts", "hal serve")
@pytest.mark.shows("a server", "hal serve")
def test_completions_are_those_of_the_llm(llm: hal.LLM, client: OpenAI) -> None:
    prompts = [TEXTS[0], TEXTS[2]]
    found = client.completions.create(
        model="tiny", prompt=prompts, n=2, max_tokens=9, temperature=0.8, top_p=0.9, seed=5, presence_penalty=0.5
    )
    expected = llm.generate(prompts, n=2, max_new_tokens=9, temperature=0.8, top_p=0.9, seed=5, presence_penalty=0.5)
    assert [each.text for each in found.choices] == [each.text for each in expected]
    assert [each.index for each in found.choices] == [0, 1, 2, 3]
    assert [each.finish_reason for each in found.choices] == [each.finish_reason for each in expected]
    assert found.usage is not None
    assert found.usage.prompt_tokens == sum(len(llm.tokenizer.encode(each).ids) for each in prompts)
    assert found.usage.completion_tokens == sum(len(each.token_ids) for each in expected)


def test_prompts_may_be_tokens(llm: hal.LLM, client: OpenAI) -> None:
    ids = [llm.tokenizer.encode(each).ids for each in TEXTS[:2]]
    one = client.completions.create(model="tiny", prompt=ids[0], max_tokens=6)
    two = client.completions.create(model="tiny", prompt=ids, max_tokens=6)
    expected = [each.text for each in llm.generate(ids, max_new_tokens=6)]
    assert [each.text for each in two.choices] == expected
    assert one.choices[0].text == expected[0]


def test_extensions_are_those_of_sampling_params(llm: hal.LLM, client: OpenAI) -> None:
    more = {"top_k": 3, "min_p": 0.01, "repetition_penalty": 1.3, "min_tokens": 5, "bad_words": ["self"]}
    found = client.completions.create(
        model="tiny", prompt=TEXTS[2], max_tokens=20, temperature=0.9, seed=2, logit_bias={"5": 2}, extra_body=more
    )
    del more["min_tokens"]
    (expected,) = llm.generate(
        TEXTS[2], max_new_tokens=20, temperature=0.9, seed=2, logit_bias={5: 2}, min_new_tokens=5, **more
    )
    assert found.choices[0].text == expected.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.shows("stop texts", "hal serve")
def test_stop_texts(stream: bool, llm: hal.LLM, client: OpenAI) -> None:
    whole = llm.generate(TEXTS[2], max_new_tokens=40)[0].text
    stop = whole[12:15]
    found: Any = client.completions.create(
        model="tiny", prompt=TEXTS[2], max_tokens=40, stop=[stop, "~"], stream=stream
    )
    choices = [each.choices[0] for each in found] if stream else [found.choices[0]]
    assert "".join(each.text for each in choices) == whole[: whole.index(stop)]
    assert choices[-1].finish_reason == "stop"


@pytest.mark.shows("log-probabilities", "hal serve")
def test_log_probabilities(llm: hal.LLM, client: OpenAI) -> None:
    (expected,) = llm.generate(TEXTS[3], max_new_tokens=6, logprobs=3)
    assert expected.logprobs is not None
    found = client.completions.create(model="tiny", prompt=TEXTS[3], max_tokens=6, logprobs=3).choices[0].logprobs
    assert found is not None
    assert found.token_logprobs == pytest.approx([each.logprob for each in expected.logprobs], abs=1e-5)
    assert "".join(found.tokens or ()) == expected.text
    assert found.text_offset == [len("".join((found.tokens or [])[:place])) for place in range(6)]
    for likely, each in zip(found.top_logprobs or (), expected.logprobs, strict=True):
        assert list(likely.values())[:3] == pytest.approx([value for _, value in each.top], abs=1e-5)
    pieces = client.completions.create(model="tiny", prompt=TEXTS[3], max_tokens=6, logprobs=3, stream=True)
    streamed = [each.choices[0].logprobs for each in pieces]
    assert [each.token_logprobs[0] for each in streamed if each and each.token_logprobs] == found.token_logprobs
    assert [each.text_offset[0] for each in streamed if each and each.text_offset] == found.text_offset


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_text", [True, False])
def test_echoed_prompts_have_their_log_probabilities(
    as_text: bool, stream: bool, max_tokens: int, llm: hal.LLM, client: OpenAI
) -> None:
    """Evaluation harnesses score texts so."""
    texts = [TEXTS[0], "na\u00efve \U0001f600\n"]
    prompts = [llm.tokenizer.encode(each).ids for each in texts]
    expected = llm.generate(prompts, max_new_tokens=1, logprobs=1, prompt_logprobs=1)
    given: Any = {"model": "tiny", "prompt": texts if as_text else prompts, "max_tokens": max_tokens, "echo": True}
    found: Any = client.completions.create(**given, logprobs=1, stream=stream)
    events = list(found) if stream else [found]
    for index, made in enumerate(expected):
        choices = (
            [each.choices[0] for each in events if each.choices[0].index == index] if stream else [found.choices[index]]
        )
        tokens, logprobs, top, offsets = (
            [one for each in choices for one in getattr(each.logprobs, name)]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        )
        every = [*(made.prompt_logprobs or ()), *(made.logprobs or ())[:max_tokens]]
        text = "".join(each.text for each in choices)
        assert text == texts[index] + made.text * max_tokens
        assert choices[-1].finish_reason == "length"
        assert (logprobs[0], top[0], offsets[0]) == (None, None, 0)
        assert logprobs[1:] == pytest.approx([each.logprob for each in every], abs=1e-4)
        assert [max(each.values()) for each in top[1:]] == pytest.approx([each.top[0][1] for each in every], abs=1e-4)
        assert len(tokens) == len(offsets) == len(prompts[index]) + max_tokens
        for token, begin, end in zip(tokens, offsets, [*offsets[1:], len(text)], strict=True):
            assert token == text[begin:end] or "\ufffd" in token
    if not stream:
        assert found.usage.completion_tokens == max_tokens * len(texts)
    plain = client.completions.create(**given, n=2)
    assert [each.text for each in plain.choices] == [
        text + made.text * max_tokens for text, made in zip(texts, expected, strict=True) for _ in range(2)
    ]


NOTHING: dict[str, Any] = {
    "user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "flex", "prompt_cache_key": "k",
    "safety_identifier": "s", "n": 1, "logit_bias": {}, "seed": -1, "top_k": -1, "min_p": 0, "repetition_penalty": 1,
    "ignore_eos": False, "stop": [], "stream_options": {"include_usage": False, "include_obfuscation": False},
    "response_format": {"type": "text"}, "skip_special_tokens": True, "structured_outputs": {}, "length_penalty": 1.0,
}  # fmt: skip


def test_fields_that_ask_for_nothing_change_nothing(url: str, client: OpenAI) -> None:
    whole: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "completions": ({"prompt": TEXTS[0]}, {"echo": False, "suffix": "", "best_of": 1}),
        "chat/completions": ({"messages": MESSAGES}, {
            "modalities": ["text"], "verbosity": "medium", "reasoning_effort": "medium", "parallel_tool_calls": False,
            "tools": [], "tool_choice": "auto", "functions": [], "logprobs": False, "top_logprobs": 0,
            "chat_template_kwargs": {},
        }),
    }  # fmt: skip
    for path, (asked, others) in whole.items():
        answers = [
            ask(url, "POST", f"/v1/{path}", json.dumps({"model": "tiny", "max_tokens": 6, **asked, **more}).encode(),
                Content_Type="application/json")[:2]
            for more in ({}, NOTHING | others)
        ]  # fmt: skip
        assert [status for status, _ in answers] == [200, 200], answers
        assert answers[0][1]["choices"] == answers[1][1]["choices"]


def test_the_table_of_fields_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/serve-a-model.md").read_text(encoding="utf-8")
    tables = (request_fields.IGNORED, request_fields.OF_TEXTS, request_fields.OF_COMPLETIONS, request_fields.OF_CHATS)
    assert [name for table in tables for name in sorted(table) if f"`{name}`" not in page] == []


def test_reasoning_effort_goes_to_templates_that_read_it(llm: hal.LLM, client: OpenAI, tmp_path: Path) -> None:
    with pytest.raises(BadRequestError, match="no switch 'reasoning_effort'") as caught:
        client.chat.completions.create(model="tiny", messages=MESSAGES, reasoning_effort="high")
    assert caught.value.param == "reasoning_effort"
    folder = tmp_path / "model"
    folder.mkdir()
    for each in llm.checkpoint.path.iterdir():
        (folder / each.name).symlink_to(each)
    (folder / "chat_template.jinja").write_text("{{ reasoning_effort }} x", encoding="utf-8")
    with hal.LLM(folder, backend="cpu", config=CONFIG) as reading, served(reading) as address:
        with OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as other:
            made = other.chat.completions.create(
                model="tiny", messages=MESSAGES, reasoning_effort="high", max_tokens=5, logprobs=True
            )
        (expected,) = reading.generate(
            reading.tokenizer.encode("high x", add_special_tokens=False).ids, max_new_tokens=5
        )
    assert made.choices[0].message.content == expected.text
    assert made.usage is not None
    assert made.usage.prompt_tokens == len(expected.prompt_token_ids)


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_fails_late_is_an_error_of_its_request(stream: bool, url: str) -> None:
    late = {"regex": "(a{1000}){1000}"}
    body = {"model": "tiny", "prompt": "x", "structured_outputs": late, "max_tokens": 9, "stream": stream}
    status, answer, _ = ask(
        url, "POST", "/v1/completions", json.dumps(body).encode(), Content_Type="application/json"
    )  # fmt: skip
    if stream:
        assert (status, answer.count("[DONE]")) == (200, 1)
        answer = json.loads(answer.split("data: ")[-2])
    else:
        assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"
    assert "no text goes on after 1 new tokens" in answer["error"]["message"]
    assert len(answer["error"]["message"]) < 400


@pytest.mark.shows("conversations", "hal serve")
def test_chat_is_that_of_the_llm(llm: hal.LLM, client: OpenAI) -> None:
    found = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=7, logprobs=True, top_logprobs=2
    )
    (expected,) = llm.chat(MESSAGES, max_new_tokens=7, logprobs=2)
    (choice,) = found.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    assert choice.logprobs is not None
    content = choice.logprobs.content or []
    assert b"".join(bytes(each.bytes or ()) for each in content).decode() == expected.text
    assert [len(each.top_logprobs) for each in content] == [2] * len(content)
    assert found.usage is not None
    assert found.usage.prompt_tokens == len(expected.prompt_token_ids)
    tools: Any = [{"type": "function", "function": {"name": "now", "parameters": {}}}]
    with_tools = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=7, tools=tools, extra_body={"chat_template_kwargs": {"shout": True}}
    )
    (expected,) = llm.chat(MESSAGES, tools=tools, shout=True, max_new_tokens=7)
    assert with_tools.choices[0].message.content == expected.text
    assert with_tools.usage is not None
    assert with_tools.usage.prompt_tokens == len(expected.prompt_token_ids)


def test_an_answer_may_fill_the_context(llm: hal.LLM, client: OpenAI) -> None:
    found = client.chat.completions.create(model="tiny", messages=MESSAGES, extra_body={"ignore_eos": True})
    assert found.usage is not None
    assert (found.usage.total_tokens, found.choices[0].finish_reason) == (llm.max_length, "length")


def test_messages_in_parts_and_calls_of_tools(llm: hal.LLM, client: OpenAI) -> None:
    """The texts of parts are joined by line breaks, here and in hal.LLM."""
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "on"}, {"type": "text", "text": "e"}]}]
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "UTC"}'}}
    history: Any = [*parts, {"role": "assistant", "content": None, "tool_calls": [call]}]
    found = client.chat.completions.create(model="tiny", messages=history, max_tokens=5)
    plain = [{"role": "user", "content": "on\ne"}, {"role": "assistant", "content": ""}]
    assert llm.chat_prompt(history) == llm.chat_prompt(plain)
    assert found.choices[0].message.content == llm.chat(plain, max_new_tokens=5)[0].text


@pytest.mark.shows("streams", "hal serve")
def test_streams_join_to_the_text(llm: hal.LLM, client: OpenAI) -> None:
    sampling: Any = {"temperature": 0.7, "seed": 1, "n": 2}
    events = list(
        client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            max_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
            **sampling,
        )
    )
    expected = llm.chat(MESSAGES, max_new_tokens=12, **sampling)
    assert events[-1].choices == []
    assert events[-1].usage is not None
    assert events[-1].usage.completion_tokens == sum(len(each.token_ids) for each in expected)
    for index, each in enumerate(expected):
        deltas = [event.choices[0] for event in events[:-1] if event.choices[0].index == index]
        assert "".join(delta.delta.content or "" for delta in deltas) == each.text
        assert [delta.delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
        assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + [each.finish_reason]
    assert len({event.id for event in events}) == 1


@pytest.mark.shows("embeddings", "hal serve")
def test_embeddings(llm: hal.LLM, client: OpenAI) -> None:
    texts = list(TEXTS[:3])
    expected = llm.embed(texts)
    by_default = client.embeddings.create(model="tiny", input=texts)
    as_floats = client.embeddings.create(model="tiny", input=texts, encoding_format="float")
    for found in (by_default, as_floats):
        vectors = torch.tensor(np.array([each.embedding for each in found.data]), dtype=torch.float32)
        torch.testing.assert_close(vectors, expected)
        assert found.usage.prompt_tokens == sum(len(llm.tokenizer.encode(each).ids) for each in texts)


@pytest.mark.shows("answers that follow a JSON schema", "hal serve")
def test_json_follows_its_schema(client: OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["a", "b"]}, "count": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["name", "count"],
        "additionalProperties": False,
    }
    asked: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=100, temperature=1, seed=3, response_format=asked
    )
    assert answer.choices[0].finish_reason == "stop"
    found = json.loads(answer.choices[0].message.content or "")
    assert found["name"] in ("a", "b")
    assert found["count"] in range(10)
    text = client.completions.create(
        model="tiny", prompt="x = ", max_tokens=20, extra_body={"structured_outputs": {"regex": "[ab]{3}"}}
    )
    assert set(text.choices[0].text) <= {"a", "b"}
    assert len(text.choices[0].text) == 3


def test_a_client_that_goes_away_frees_what_it_held(llm: hal.LLM, url: str) -> None:
    cancelled = 'hal_requests_total{path="/v1/completions",status="cancelled"}'

    async def go() -> None:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            asked: Any = {"model": "tiny", "prompt": TEXTS[0], "max_tokens": 140, "extra_body": {"ignore_eos": True}}
            stream = await client.completions.create(stream=True, **asked)
            async for _ in stream:
                break
            await stream.close()
            whole = asyncio.create_task(client.completions.create(**asked))
            while not llm.occupancy.running:
                await asyncio.sleep(0.001)
            whole.cancel()

    asyncio.run(go())
    until(lambda: (llm.occupancy.running, llm.occupancy.waiting, llm.occupancy.blocks) == (0, 0, 0))
    until(lambda: cancelled in ask(url, "GET", "/metrics")[1])


def test_figures(url: str, client: OpenAI) -> None:
    names = ("hal_prompt_tokens_total", "hal_generated_tokens_total", "hal_time_to_first_token_seconds_count")
    before = [metric(url, name) for name in names]
    used = client.completions.create(model="tiny", prompt=TEXTS[1], max_tokens=5).usage
    assert used is not None
    after = [metric(url, name) for name in names]
    assert [two - one for one, two in zip(before, after, strict=True)] == [
        used.prompt_tokens,
        used.completion_tokens,
        1,
    ]
    assert metric(url, "hal_texts_running") == metric(url, "hal_texts_waiting") == metric(url, "hal_cache_blocks") == 0
    assert metric(url, "hal_cache_blocks_limit") > 0
    assert ask(url, "GET", "/health")[0] == 200


def test_figures_of_drafts() -> None:
    counts = [Acceptance((9, 7), (6, 2), 9)]
    metrics = ServerMetrics(lambda: Occupancy(0, 0, 0, 1), lambda: counts[-1])
    counts.append(Acceptance((10, 8), (7, 2), 10))
    lines = metrics.text().decode().splitlines()
    assert {'hal_drafted_tokens{place="1"} 10.0', 'hal_drafted_tokens{place="2"} 8.0'} <= {*lines}
    assert {'hal_accepted_tokens{place="1"} 7.0', 'hal_accepted_tokens{place="2"} 2.0'} <= {*lines}
    assert b"drafted" not in ServerMetrics(lambda: Occupancy(0, 0, 0, 1)).text()


SENTENCE_PIECE = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]


@pytest.mark.parametrize(
    ("decoder", "written", "text", "spelled"),
    [
        *((decoders.Sequence(SENTENCE_PIECE), *each) for each in (
            ("\u2581true", " true", b" true"),
            ("true", "true", b"true"),
            ("\u2581", " ", b" "),
            ("<0x0A>", "\n", b"\n"),
            ("<0xE2>", "\ufffd", b"\xe2"),
            ("\ufffd", "\ufffd", "\ufffd".encode()),
            ("<end\u2581of>", "<end\u2581of>", "<end\u2581of>".encode()),
        )),
        (decoders.Metaspace(), "\u2581true", " true", b" true"),
        (decoders.WordPiece(), "true", " true", b" true"),
        (decoders.WordPiece(), "##true", "true", b"true"),
        (decoders.WordPiece(), "<end\u2581of>", "<end\u2581of>", "<end\u2581of>".encode()),
        (decoders.ByteLevel(), "\u0120true", " true", b" true"),
        (decoders.ByteLevel(), "\u00c3", "\ufffd", b"\xc3"),
        (decoders.ByteLevel(), "\u00a9", "\ufffd", b"\xa9"),
    ],
)  # fmt: skip
def test_tokens_read_as_in_the_middle_of_a_text(decoder: Any, written: str, text: str, spelled: bytes) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, written: 1}, unk_token="a"))
    tokenizer.decoder = decoder
    if written.startswith("<end"):
        tokenizer.add_special_tokens([written])
    tokens = TokenText(tokenizer)
    assert (tokens.text(1), bytes(tokens.bytes(1) or ())) == (text, spelled)


def test_tokens_of_the_same_text_are_all_among_the_likely_ones() -> None:
    """The chosen one has its text, so that clients can tell whether it is the likeliest; the others their ids."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "A": 1, "<0x41>": 2, "<0xE2>": 3, "<0xE3>": 4}, unk_token="a"))
    tokenizer.decoder = decoders.ByteFallback()
    piece = Piece(0, "A", 2, None, 0, -2.0, ((1, -0.5), (2, -2.0), (3, -3.0), (4, -4.0)))
    found = CompletionAnswer("tiny", 1, TokenText(tokenizer)).whole([piece], {})["choices"][0]["logprobs"]
    assert found["tokens"] == ["A"]
    assert list(found["top_logprobs"][0].items()) == [
        ("token_id:1", -0.5), ("A", -2.0), ("\ufffd", -3.0), ("token_id:4", -4.0)
    ]  # fmt: skip
    content = ChatAnswer("tiny", 1, TokenText(tokenizer)).whole([piece], {})["choices"][0]["logprobs"]["content"]
    assert [(each["token"], each["bytes"]) for each in content[0]["top_logprobs"]] == [
        ("A", [0x41]), ("A", [0x41]), ("\ufffd", [0xE2]), ("\ufffd", [0xE3])
    ]  # fmt: skip


@pytest.mark.parametrize("chat", [False, True])
def test_what_the_model_records(chat: bool, llm: hal.LLM, url: str, trained_experts: Path) -> None:
    """The experts of each text are those of hal.LLM, whole and at the end of a stream; else the field is refused."""
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 5, "temperature": 0, "n": 2, "record": ["experts"]}
    asked |= {"messages": MESSAGES} if chat else {"prompt": [5, 6, 7]}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    json_type = {"Content_Type": "application/json"}
    status, refused, _ = ask(url, "POST", path, json.dumps(asked).encode(), **json_type)
    assert status == 400
    assert "the server records nothing" in refused["error"]["message"]
    if chat:
        return
    with hal.LLM(trained_experts, backend="cpu", config=CONFIG, max_sequences=4, record=["experts"]) as mixture:
        texts = mixture.generate([[5, 6, 7]], n=2, max_new_tokens=5, temperature=0)
        with served(mixture) as address:
            _, whole, _ = ask(address, "POST", path, json.dumps(asked).encode(), **json_type)
            _, events, _ = ask(address, "POST", path, json.dumps({**asked, "stream": True}).encode(), **json_type)
    streamed = [json.loads(line.removeprefix("data: ")) for line in events.split("\n\n") if line.startswith("data: {")]
    for choices in (whole["choices"], [each["choices"][0] for each in streamed]):
        found = {each["index"]: each["recorded"]["experts"] for each in choices if "recorded" in each}
        for index, text in enumerate(texts):
            values = np.frombuffer(base64.b64decode(found[index]["data"]), found[index]["dtype"])
            assert np.array_equal(values.reshape(found[index]["shape"]), text.choices["experts"].numpy())


def test_recorded_choices_are_replayed(url: str, trained_experts: Path) -> None:
    """Scores with given experts are those of hal.LLM. What cannot be replayed is refused in words."""
    kept: Any = {"record": ["experts"], "replay": ["experts"]}
    with hal.LLM(trained_experts, backend="cpu", config=CONFIG, max_sequences=4, **kept) as mixture:
        prompts = [[5, 6, 7], [8, 9]]
        texts = mixture.generate(prompts, max_new_tokens=5, temperature=0, ignore_eos=True)
        whole = [[*text.prompt_token_ids, *text.token_ids] for text in texts]
        choices = [{"experts": text.choices["experts"].flip(0)} for text in texts]
        wanted = mixture.log_probabilities([each[:1] for each in whole], [each[1:] for each in whole], choices=choices)
        asked = {"model": "tiny", "prompt": whole, "echo": True, "max_tokens": 0, "logprobs": 0}
        sent = [{"experts": attrs.asdict(SentTensor.of(each["experts"]))} for each in choices]
        cut = {**sent[0]["experts"], "data": sent[0]["experts"]["data"][:-4]}

        def answer(replay: Any, to: str = "", **changes: Any) -> tuple[int, Any]:
            body = json.dumps({**asked, "replay": replay, **changes}).encode()
            return ask(to or address, "POST", "/v1/completions", body, Content_Type="application/json")[:2]

        with served(mixture) as address:
            _, found = answer(sent)
            for replay, changes, problem in (
                (sent, {"max_tokens": 4}, "replay is given, and the request generates text: set echo to true"),
                (sent[:1], {}, "for 2 sequences"),
                ([{"positions": cut}] * 2, {}, "replay has positions, and the server replays experts"),
                ([{"experts": cut}] * 2, {}, "replay has no tensor: it has"),
                ([{"experts": {**cut, "data": "?"}}] * 2, {}, "replay has no tensor"),
                ([{"experts": {**cut, "dtype": "float32"}}] * 2, {}, "float32"),
            ):
                status, refused = answer(replay, **changes)
                assert (status, problem in refused["error"]["message"]) == (400, True), refused
    for each, logprobs in zip(found["choices"], wanted, strict=True):
        assert each["logprobs"]["token_logprobs"][1:] == logprobs.tolist()
    assert "the server replays nothing" in answer(sent, url)[1]["error"]["message"]
