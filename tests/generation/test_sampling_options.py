"""Tests for stop texts, biases, bad words and log-probabilities of hal.generate."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from helpers.reference import TEXTS, open_runner, prompts
from hypothesis import given
from hypothesis import strategies as st

import hal
from hal.errors import ConfigError
from hal.generation.generated_text import GeneratedText, StopText

TOKENIZER = hal.Checkpoint.open(Path(__file__).parents[2] / "checkpoints" / "tiny-python").tokenizer()


@pytest.fixture(scope="module")
def runner(trained: Path) -> hal.Runner:
    return open_runner(trained)


def new(runner: hal.Runner, text: str, **options: Any) -> list[hal.Token]:
    ids = TOKENIZER.encode(text).ids
    return list(hal.generate(runner, [ids], hal.SamplingParams(**options), TOKENIZER))


def ids(tokens: list[hal.Token]) -> list[int]:
    return [token.token_id for token in tokens]


@pytest.fixture(scope="module")
def plain(runner: hal.Runner) -> list[int]:
    return ids(new(runner, TEXTS[2], max_new_tokens=12))


@given(st.text("ab\u00e9", max_size=14), st.lists(st.text("ab\u00e9", min_size=1, max_size=4), max_size=3), st.data())
def test_a_text_ends_before_the_first_stop_text_however_it_arrives(text: str, stops: list[str], data: Any) -> None:
    ending, found, place = StopText(stops), "", 0
    while place < len(text) and ending.stopped is None:
        size = data.draw(st.integers(1, 3))
        released = ending.push(text[place : place + size])
        place += size
        found += released
        assert not any(stop in found for stop in stops)
        seen = text[:place]
        if ending.stopped is None:  # Only what may begin a stop text is held back.
            held = seen[len(found) :]
            assert not held or any(stop.startswith(held) for stop in stops)
    found += ending.flush()
    if ending.stopped is None:
        assert found == text
    else:
        assert text.startswith(found + ending.stopped)


@given(st.text(max_size=10), st.text("a \u00e9\U0001f600", min_size=1, max_size=3))
def test_the_text_of_tokens_is_cut_before_a_stop_text(text: str, stop: str) -> None:
    tokens = TOKENIZER.encode(text).ids
    made = GeneratedText(TOKENIZER, [], hal.SamplingParams(stop=stop))
    found = "".join(made.push(token, last=place == len(tokens) - 1) for place, token in enumerate(tokens))
    assert found == text.split(stop)[0]
    assert (made.stopped == stop) == (stop in text)


def test_stop_texts_end_the_tokens(runner: hal.Runner, plain: list[int]) -> None:
    text = TOKENIZER.decode(plain)
    found = new(runner, TEXTS[2], max_new_tokens=12, stop=(text[9:12], "nowhere"))
    assert ids(found) == plain[: len(found)]
    assert len(found) < len(plain)
    assert (found[-1].finished, found[-1].stop) == ("stop", text[9:12])
    assert all(each.finished is None and each.stop is None for each in found[:-1])


def test_biases_and_stop_tokens_before_their_time(runner: hal.Runner, plain: list[int]) -> None:
    assert set(ids(new(runner, TEXTS[2], max_new_tokens=4, logit_bias={77: 1000.0}))) == {77}
    without = ids(new(runner, TEXTS[2], max_new_tokens=12, logit_bias={plain[0]: -1000}))
    assert plain[0] not in without
    stop = plain[3]
    stopped = ids(new(runner, TEXTS[2], max_new_tokens=12, stop_token_ids={stop}))
    assert stopped == plain[: plain.index(stop) + 1]
    late = ids(new(runner, TEXTS[2], max_new_tokens=12, stop_token_ids={stop}, min_new_tokens=8))
    assert len(late) >= 8
    assert stop not in late[:8]


def test_bad_words_do_not_occur(runner: hal.Runner, plain: list[int]) -> None:
    word = TOKENIZER.decode(plain[:1]).strip() or TOKENIZER.decode(plain[1:2]).strip()
    assert word in TOKENIZER.decode(plain)
    found = new(runner, TEXTS[2], max_new_tokens=12, bad_words=[word, "return self"])
    spelled = [TOKENIZER.encode(each).ids for each in (word, f" {word}", "return self", " return self")]
    got = ids(found)
    assert not any(got[place : place + len(each)] == each for each in spelled for place in range(len(got)))


def test_options_of_one_prompt_leave_others_alone(runner: hal.Runner, trained: Path) -> None:
    texts = prompts(trained)[:3]
    params = [
        hal.SamplingParams(max_new_tokens=6),
        hal.SamplingParams(max_new_tokens=6, logit_bias={9: 3.0}, logprobs=2),
        hal.SamplingParams(max_new_tokens=6, min_new_tokens=6, stop_token_ids={0}, logprobs=0),
    ]
    together = list(hal.generate(runner, texts, params))
    for index, (text, each) in enumerate(zip(texts, params, strict=True)):
        mine = [token for token in together if token.prompt_index == index]
        (alone) = list(hal.generate(runner, [text], each))
        assert ids(mine) == ids(alone)
        assert [len(token.top_logprobs) for token in mine] == [each.logprobs or 0] * 6
        assert all((token.logprob is None) == (each.logprobs is None) for token in mine)


OUT_OF_RANGE: dict[str, list[float]] = {
    "max_new_tokens": [0],
    "min_new_tokens": [200],
    "temperature": [-0.1, math.inf, math.nan],
    "top_k": [-2],
    "top_p": [0.0, 1.1, math.nan],
    "min_p": [-0.1, 1.1],
    "seed": [-(2**63) - 1, 2**63],
    "repetition_penalty": [0.0, -1.0, math.inf, math.nan],
    "frequency_penalty": [2.1, math.nan],
    "presence_penalty": [-2.1, -math.inf],
    "logprobs": [1001],
    "n": [0],
}
WRONG: dict[str, list[Any]] = {
    "stop": [[""], 3],
    "bad_words": [[b"x"]],
    "ignore_eos": [1],
    "logit_bias": [{"a": 1}, {1: math.inf}],
    "logprobs": [True],
    "max_new_tokens": [2.5],
    "temperature": ["hot"],
    "top_k": [2**31],
    "stop_token_ids": [0],
    "seed": [True],
    "repetition_penalty": ["1"],
    "frequency_penalty": [True],
    "mask": [[1]],
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_parameters_have_ranges(name: str) -> None:
    for value in OUT_OF_RANGE[name]:
        with pytest.raises(ConfigError, match=f"{name} is .*, out of its range\n.*give "):
            hal.SamplingParams(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", WRONG)
def test_parameters_of_a_wrong_type_are_named(name: str) -> None:
    for value in WRONG[name]:
        with pytest.raises(ConfigError, match=f"{name} is "):
            hal.SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"n": 2}, r"n is 2: .*\n.*hal.LLM"),
        ({"prompt_logprobs": 1}, r"prompt_logprobs is 1: .*\n.*hal.LLM"),
        ({"stop": "x"}, r"stop of prompt 0 is text, and there is no tokenizer"),
        ({"bad_words": "x"}, r"bad_words of prompt 0 is text"),
        ({"logit_bias": {1 << 20: 1}}, r"logit_bias of prompt 0 names token 1048576"),
    ],
)
def test_what_generate_cannot_do_is_said(given: dict[str, Any], message: str, runner: hal.Runner) -> None:
    with pytest.raises(ConfigError, match=message):
        hal.generate(runner, [[5]], hal.SamplingParams(**given))
