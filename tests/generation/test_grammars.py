"""Tests for texts that follow a JSON schema or a regular expression."""

from __future__ import annotations

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
    sampling: dict[str, Any] = {"temperature": 1.2, "max_new_tokens": 120, "seed": seed}
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
        ({"regex": "a", "json_schema": {}}, "json_schema and regex exclude each other"),
        ({"regex": "a", "ignore_eos": True}, "regex and ignore_eos exclude each other"),
        ({"regex": "a", "min_new_tokens": 2}, "regex and min_new_tokens exclude each other"),
        ({"regex": "a", "mask": lambda generated: None}, "regex and mask exclude each other"),
    ],
)
def test_mistakes(given: dict[str, Any], problem: str, llm: hal.LLM) -> None:
    with pytest.raises(ConfigError, match=problem):
        llm.generate("x", **given)
    assert llm.generate("x", max_new_tokens=1)[0].token_ids


def test_a_checkpoint_without_stop_tokens(trained: Path) -> None:
    params = hal.SamplingParams(regex="a+")
    backend = hal.open({"backend": "cpu", "dtype": "float32"})
    with hal.Runner(hal.load_model(trained, backend), backend) as runner:
        tokenizer = hal.Checkpoint.open(trained).tokenizer()
        with pytest.raises(ConfigError, match="regex needs a token that ends the text"):
            list(hal.generate(runner, [[1]], params, tokenizer))
        with pytest.raises(ConfigError, match="regex of prompt 0 is text, and there is no tokenizer"):
            list(hal.generate(runner, [[1]], params))
