"""Tests for texts that follow a JSON schema or a regular expression."""

from __future__ import annotations

import functools
import json
import logging
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.reference import TEXTS

import hal
from hal.errors import ConfigError

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ada", "Bob", "Zo\u00eb \U0001f600"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 3},
        "alive": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "alive"],
    "additionalProperties": False,
}
NUMBER = r"-?[0-9]{1,3}(\.[0-9]{2})?"


@pytest.fixture(scope="module")
def llm(trained: Path) -> Iterator[hal.LLM]:
    with hal.LLM(
        trained, backend="cpu", dtype="float32", max_sequences=8, config={"cache": {"num_tokens": 4096}}
    ) as made:
        yield made


def check_person(text: str) -> None:
    found = json.loads(text)
    assert list(found) == list(PERSON["properties"])
    assert found["name"] in PERSON["properties"]["name"]["enum"]
    assert type(found["age"]) is int
    assert 0 <= found["age"] <= 120
    assert set(found["tags"]) <= {"x", "y"}
    assert type(found["alive"]) is bool


@pytest.mark.shows("answers that follow a JSON schema", "hal.LLM")
def test_texts_follow_their_grammars_beside_others(llm: hal.LLM) -> None:
    """Every text that ends does, whatever the other texts of its steps follow."""
    seed = random.randrange(1 << 30)
    logging.getLogger("tests").info("seed %d", seed)
    sampling: dict[str, Any] = {"temperature": 1.2, "max_new_tokens": 400, "seed": seed}
    people = llm.generate(TEXTS[:3], json_schema=PERSON, n=3, **sampling)
    numbers = llm.generate("x = ", regex=NUMBER, n=4, **sampling)
    for each in people:
        assert each.finish_reason == "stop"
        check_person(each.text)
    for each in numbers:
        assert re.fullmatch(NUMBER, each.text)
        assert each.finish_reason == "stop"
    assert len({each.text for each in (*people, *numbers)}) > 4
    alone = llm.generate(TEXTS[1], json_schema=PERSON, **{**sampling, "seed": seed + 3})[0]
    assert alone.text == people[3].text


def test_the_three_ways_in_agree(llm: hal.LLM, trained: Path) -> None:
    (expected,) = llm.generate("x = ", json_schema=PERSON, max_new_tokens=120)
    check_person(expected.text)
    text = json.dumps(PERSON)
    assert "".join(llm.stream("x = ", json_schema=text, max_new_tokens=120)) == expected.text
    params = hal.SamplingParams(json_schema=text, max_new_tokens=120, stop_token_ids=llm.checkpoint.stop_token_ids)
    backend = hal.open({"backend": "cpu", "dtype": "float32"})
    with hal.Runner(hal.load_model(trained, backend), backend) as runner:
        prompt = llm.tokenizer.encode("x = ").ids
        tokens = [each.token_id for each in hal.generate(runner, [prompt], params, llm.tokenizer)]
    assert tokens == list(expected.token_ids)


def test_a_schema_of_anything_and_of_nothing(llm: hal.LLM) -> None:
    json.loads(llm.generate("x = ", json_schema={"enum": [1, "two", None]}, max_new_tokens=20)[0].text)
    (cut,) = llm.generate("x = ", json_schema={"type": "object"}, max_new_tokens=3)
    assert cut.finish_reason == "length"


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"regex": "("}, r"regex is '\('"),
        ({"regex": 3}, "regex is 3, not a text"),
        ({"json_schema": "{"}, "json_schema is '{'"),
        ({"json_schema": [1]}, r"json_schema is \[1\]"),
        ({"json_schema": True}, "json_schema is True"),
        ({"json_schema": {"type": "nonsense"}}, "json_schema is "),
        ({"json_schema": {"$ref": "#"}}, "json_schema is .* no text goes on after 0 new tokens"),
        ({"json_schema": functools.reduce(lambda inner, _: {"items": inner}, range(200), {})}, "recursion limit"),
        ({"json_schema": {"patternProperties": {"^a": {"type": "null"}, "^ab": {}}}}, "are not disjoint"),
        ({"json_schema": {"enum": []}}, "Unsatisfiable"),
        ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}}, "Unsatisfiable"),
        ({"json_schema": {"not": {"type": "string"}}}, "Unimplemented keys"),
        ({"json_schema": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "oneOf"),
        ({"json_schema": {"$ref": "https://example.com/x.json"}}, "does not fetch"),
        ({"json_schema": {"type": "string", "pattern": "a(?!b)"}}, "look-around"),
        ({"regex": r"a[^\s\S]"}, "regex is .* no text goes on after 0 new tokens"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": "a", "json_schema": {}}, "json_schema and regex exclude each other"),
        ({"regex": "a", "ignore_eos": True}, "regex and ignore_eos exclude each other"),
        ({"regex": "a", "min_new_tokens": 2}, "regex and min_new_tokens exclude each other"),
        ({"regex": "a", "mask": lambda generated: None}, "regex and mask exclude each other"),
    ],
)
def test_mistakes(given: dict[str, Any], problem: str, llm: hal.LLM) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        llm.stream("x", **given)
    assert caught.value.key in given
    assert len(caught.value.problem) < 400
    assert "<" not in caught.value.problem
    assert llm.generate("x", max_new_tokens=1)[0].token_ids


@pytest.mark.parametrize(
    "given",
    [
        {"regex": "a{100000000}"},
        {  # Behind the comma, no other name is left.
            "json_schema": {
                "type": "object",
                "properties": {"a": {"const": 1}},
                "patternProperties": {"^a$": {"const": 1}},
                "required": ["a"],
                "minProperties": 2,
                "additionalProperties": False,
            },
        },
    ],
    ids=str,
)
def test_a_grammar_that_fails_late_ends_its_own_text_alone(given: dict[str, Any], llm: hal.LLM) -> None:
    (expected,) = llm.generate(TEXTS[0], max_new_tokens=60)
    beside = llm.stream(TEXTS[0], max_new_tokens=60)
    begun = next(beside)
    with pytest.raises(ConfigError, match=r"is .*, and no text goes on after \d+ new tokens") as caught:
        llm.generate("x", max_new_tokens=60, **given)
    assert (caught.value.key,) == (*given,)
    assert len(caught.value.problem) < 400
    assert "<" not in caught.value.problem
    assert begun + "".join(beside) == expected.text


def test_a_checkpoint_without_stop_tokens(trained: Path) -> None:
    params = hal.SamplingParams(regex="a+")
    backend = hal.open({"backend": "cpu", "dtype": "float32"})
    with hal.Runner(hal.load_model(trained, backend), backend) as runner:
        tokenizer = hal.Checkpoint.open(trained).tokenizer()
        with pytest.raises(ConfigError, match="regex needs a token that ends the text"):
            list(hal.generate(runner, [[1]], params, tokenizer))
        with pytest.raises(ConfigError, match="regex of prompt 0 is text, and there is no tokenizer"):
            list(hal.generate(runner, [[1]], params))
