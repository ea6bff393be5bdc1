"""Tests for models that read images and videos, against Hugging Face transformers, on random checkpoints."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from helpers.comparison import TOLERANCE, difference
from helpers.reference import open_runner
from helpers.seeing import IMAGE_ID, VIDEO_ID, Story, build, item, our_logits, story, text, their_logits
from helpers.thorough import DRAW, EXHAUSTIVE, MODE, thorough

import hal
from hal.errors import BatchError, ModelError

FAMILIES = ("Qwen3VL", "Qwen3VLMoe", "Qwen2_5_VL")
SEEDS = range(20)


@pytest.fixture(scope="module", params=[(f, s) for s in SEEDS for f in FAMILIES], ids=lambda p: f"{p[0]}-seed={p[1]}")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, list[Story]]:
    family, seed = request.param
    path = tmp_path_factory.mktemp(family)
    model, draw = build(family, seed, path), random.Random(seed)
    kinds: list[list[str]] = [["image"], [], ["image", "image", "image"], ["video"], ["image", "video"]]
    return model, path, [story(draw, model, each) for each in draw.sample(kinds, 4)]


def check(runner: hal.Runner, model: Any, stories: Sequence[Story], cuts: Sequence[int] | None = None) -> None:
    theirs = [their_logits(model, each) for each in stories]
    assert difference(our_logits(runner, stories, cuts), theirs) <= TOLERANCE


MORE = r"-seed=([3-9]|1\d)"


@thorough(DRAW, r"-seed=[1-9]")
@thorough(EXHAUSTIVE, MORE)
def test_logits(case: tuple[Any, Path, list[Story]]) -> None:
    model, path, stories = case
    check(open_runner(path), model, stories)


@thorough(DRAW, r"-seed=[1-9]")
@thorough(EXHAUSTIVE, MORE)
def test_a_prefill_continues_within_an_image(case: tuple[Any, Path, list[Story]]) -> None:
    model, path, stories = case
    cuts = [next((at for at, token in enumerate(each.tokens) if token >= IMAGE_ID), 0) + 1 for each in stories]
    cuts = [min(cut, each.length - 1) for cut, each in zip(cuts, stories, strict=True)]
    check(open_runner(path), model, stories, cuts)


@thorough(MODE, r"(Moe|Qwen2_5_VL)-seed=0|-seed=1\]")
@thorough(EXHAUSTIVE, r"-seed=([2-9]|1\d)")
def test_logits_of_captured_steps(case: tuple[Any, Path, list[Story]]) -> None:
    model, path, stories = case
    check(open_runner(path, "graph"), model, stories)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    path = tmp_path_factory.mktemp("seeing")
    return build("Qwen3VL", 3, path), path


def generated(runner: hal.Runner, stories: Sequence[Story], tokens: int = 6) -> list[list[int]]:
    """Return the greedy continuations of the stories' prompts."""
    prompts, items = [each.tokens[: each.length] for each in stories], [each.items for each in stories]
    found: list[list[int]] = [[] for _ in stories]
    params = hal.SamplingParams(max_new_tokens=tokens)
    for token in hal.generate(runner, prompts, params, items=items):
        found[token.prompt_index].append(token.token_id)
    return found


def their_tokens(model: Any, told: Story, tokens: int = 6) -> list[int]:
    known = told.tokens[: told.length]
    for _ in range(tokens):
        known.append(int(their_logits(model, attrs.evolve(told, tokens=known))[-1].argmax()))
    return known[told.length :]


def test_generation_of_prompts_with_and_without_images(seeing: tuple[Any, Path]) -> None:
    model, path = seeing
    draw = random.Random(7)
    stories = [story(draw, model, kinds) for kinds in (["image"], [], ["video", "image"])]
    runner = open_runner(path)
    assert generated(runner, stories) == [their_tokens(model, each) for each in stories]


def reusing(path: Path, **cache: Any) -> hal.Runner:
    """Return a runner that shares prefixes."""
    cache = {"num_tokens": 2048, "block_size": 4, "reuse_prefixes": True, **cache}
    backend = hal.open({"backend": "cpu", "dtype": "float32", "cache": cache})
    return hal.Runner(hal.load_model(path, backend), backend)


def test_prefixes_are_shared_only_with_equal_images(seeing: tuple[Any, Path]) -> None:
    """Equal tokens with other pixels are another prefix. An image in a shared prefix is not encoded again."""
    model, path = seeing
    draw = random.Random(8)
    first = story(draw, model, ["image", "image"])
    other = item(draw, model, size=first.items[0].grid)
    changed = attrs.evolve(first, items=[other, first.items[1]])
    with reusing(path, num_embeddings=1) as runner:
        expected = [their_tokens(model, each) for each in (first, changed, first)]
        assert expected[0] != expected[1]
        assert [generated(runner, [each])[0] for each in (first, changed, first)] == expected


def test_a_repeated_image_is_not_encoded_again(seeing: tuple[Any, Path]) -> None:
    model, path = seeing
    draw = random.Random(9)
    told = story(draw, model, ["image", "image"])
    with open_runner(path) as runner:
        steps = runner.encoding_steps
        once = runner.encode(told.items)
        assert runner.encoding_steps == steps + 1
        again = runner.encode([told.items[1], told.items[0]])
        assert runner.encoding_steps == steps + 1
        assert torch.equal(once[0], again[1])
        assert torch.equal(once[1], again[0])


def test_the_least_recent_embeddings_are_dropped(seeing: tuple[Any, Path]) -> None:
    model, path = seeing
    draw = random.Random(10)
    one, two, three = (item(draw, model, size=(1, 4, 4)) for _ in range(3))
    with reusing(path, num_embeddings=8) as runner:  # two images of four
        runner.encode([one, two])
        runner.encode([one])
        runner.encode([three])
        steps = runner.encoding_steps
        runner.encode([one, three])
        assert runner.encoding_steps == steps
        runner.encode([two])
        assert runner.encoding_steps == steps + 1


def refused(runner: hal.Runner, tokens: Sequence[int], items: Sequence[Any], match: str) -> None:
    with pytest.raises(BatchError, match=match):
        next(iter(hal.generate(runner, [tokens], hal.SamplingParams(max_new_tokens=1), items=[items])))


def test_items_that_do_not_fit_the_prompt_are_refused(seeing: tuple[Any, Path]) -> None:
    model, path = seeing
    draw = random.Random(11)
    told, one = story(draw, model, ["image"]), item(draw, model, size=(1, 4, 4))
    prompt = told.tokens[: told.length]
    with open_runner(path) as runner:
        refused(runner, prompt, [], "placeholders for images or videos from token")
        refused(runner, prompt, [*told.items, one], "no 4 placeholders in a row for image 1")
        refused(runner, text(draw, 5), [one], "no 4 placeholders in a row for image 0")
        refused(runner, [1, *[IMAGE_ID] * 3, 2], [one], "no 4 placeholders in a row")
        refused(runner, [1, *[VIDEO_ID] * 4, 2], [one], "no 4 placeholders in a row")
        refused(runner, [*[IMAGE_ID] * 4, 2], [attrs.evolve(one, values=one.values[:, :5])], "has values")
        refused(runner, [*[IMAGE_ID] * 4, 2], [attrs.evolve(one, grid=(1, 3, 4))], "multiples of 2")


def test_a_model_of_text_refuses_items(trained: Path) -> None:
    with open_runner(trained) as runner:
        assert runner.model.encoder is None
        with pytest.raises(ModelError, match="has no encoder"):
            runner.encode([])
