"""Tests that prompts of models with recurrent layers resume from saved states, exactly, and within their budget."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import published_configs
from helpers.thorough import FAMILY, MODE, spread, thorough
from torch import Tensor

import hal
from hal.errors import ConfigError
from hal.step import NONE
from hal.step.block_allocator import BlockAllocator, PrefixCache, SavedStates

VOCAB, INTERVAL = 96, 32


@pytest.fixture(scope="module", params=["Qwen3.5-0.8B", "GLM-5.3-Flash", "DeepSeek-V4-Flash", "Qwen3.8-Flash-Next"])
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with recurrent layers, or, like that of GLM-5.3 too, with tokens of incomplete groups."""
    path = published_configs.write(tmp_path_factory.mktemp("saved") / "model", request.param)
    config = json.loads((path / "config.json").read_text())
    if "Qwen3.5" in request.param:
        config["architectures"] = ["Qwen3_5ForCausalLM"]  # The text model: random texts have placeholders of images.
    (path / "config.json").write_text(json.dumps(config))
    return path


class Watching(hal.Runner):
    """Keeps the number of tokens and the logits of each step."""

    seen: list[tuple[int, Tensor | None]]

    def step(self, batch: hal.step.Batch, rows: Any = hal.step.LAST) -> hal.StepOutput:
        output = super().step(batch, rows)
        self.seen.append((batch.num_tokens, None if rows is NONE else output.logits.clone()))
        return output


def open_runner(folder: Path, *, saved: int | None, compiler: str = "eager", **cache: Any) -> Watching:
    given = {"num_tokens": 2048, "block_size": 16, "num_sequences": 3, **cache}
    if saved is not None:
        given |= {"reuse_prefixes": True, "saved_states": saved, "saved_states_interval": INTERVAL}
    compilation = {"compiler": compiler} | ({} if compiler == "eager" else {"capture_sizes": [1, 2, 4]})
    backend = hal.open({"backend": "cpu", "dtype": "float32", "cache": given, "compilation": compilation})
    runner = Watching(hal.load_model(folder, backend), backend)
    runner.seen = []
    return runner


def texts(runner: hal.Runner, prompts: list[list[int]], new: int = 6) -> list[list[int]]:
    made: list[list[int]] = [[] for _ in prompts]
    runner.backend.activate()
    for token in hal.generate(runner, prompts, hal.SamplingParams(max_new_tokens=new)):
        made[token.prompt_index].append(token.token_id)
    return made


def drawn(seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCAB) for _ in range(count)]


@thorough(MODE, r"piecewise|Flash-graph")
@spread
@pytest.mark.parametrize("compiler", ["eager", "graph", "piecewise"])
def test_a_resumed_prompt_gets_the_logits_of_a_whole_one(hybrid: Path, compiler: str) -> None:
    common = drawn(1, 70)
    first, second = common + drawn(2, 9), common + drawn(3, 20)
    fresh, reusing = (open_runner(hybrid, saved=each, compiler=compiler) for each in (4, 4))
    expected = texts(fresh, [second])
    texts(reusing, [first])
    before = len(reusing.seen)
    assert texts(reusing, [second]) == expected
    (tokens, resumed), *_ = reusing.seen[before:]
    assert tokens == len(second) - 64, "two places of 32 tokens are shared"
    whole = next(logits for _, logits in fresh.seen if logits is not None)
    assert resumed is not None
    assert torch.equal(resumed, whole), "both ended a step at 64 tokens"
    assert texts(open_runner(hybrid, saved=None, compiler=compiler), [second]) == expected


@thorough(FAMILY, "Flash")
def test_many_prompts_of_few_beginnings_get_the_tokens_that_they_get_alone(hybrid: Path) -> None:
    """Beginnings of one another, alone and together, with fewer slots than places, beside sequences that decode."""
    draw = random.Random(7)
    stems = [drawn(10 + index, 100) for index in range(3)]
    prompts = [draw.choice(stems)[: draw.randint(1, 100)] + drawn(draw.randrange(99), 5) for _ in range(24)]
    expected = texts(open_runner(hybrid, saved=None), prompts, new=40)
    reusing = open_runner(hybrid, saved=8)
    found = [each for start in range(0, 24, 4) for each in texts(reusing, prompts[start : start + 4], new=40)]
    assert found == expected, "seed 7"
    ran = sum(tokens for tokens, _ in reusing.seen)
    assert ran < sum(map(len, prompts)) + 24 * 39, "some prefix was shared"
    assert reusing.slots.num_free == 3


def test_a_text_resumes_where_it_was_generated(hybrid: Path) -> None:
    """States are saved while tokens are generated, too."""
    runner = open_runner(hybrid, saved=4)
    prompt = drawn(5, 20)
    (made,) = texts(runner, [prompt], new=50)
    longer = [*prompt, *made, *drawn(6, 3)]
    expected = texts(open_runner(hybrid, saved=None), [longer])
    before = len(runner.seen)
    assert texts(runner, [longer]) == expected
    assert runner.seen[before][0] == len(longer) - 64


def test_new_weights_forget_the_states(hybrid: Path) -> None:
    runner = open_runner(hybrid, saved=4)
    prompt = drawn(8, 80)
    expected = texts(runner, [prompt])
    runner.forget()
    before = len(runner.seen)
    assert texts(runner, [prompt]) == expected
    assert [tokens for tokens, _ in runner.seen[before:]][:3] == [32, 32, 16]


@pytest.fixture
def kept() -> Iterator[tuple[SavedStates, dict[int, str]]]:
    content = {10: "a", 11: "b", 12: "c"}

    def copy(source: int, target: int) -> None:
        content[target] = content[source]

    return SavedStates([1, 2], INTERVAL, copy), content


def test_the_least_recently_used_states_give_way(kept: tuple[SavedStates, dict[int, str]]) -> None:
    saved, content = kept
    saved.save(b"a", 10)
    saved.save(b"b", 11)
    saved.load(b"a", 20)
    assert content[20] == "a"
    saved.save(b"c", 12)
    assert b"a" in saved
    assert b"c" in saved
    assert b"b" not in saved
    saved.save(b"a", 11)  # known: nothing is copied
    saved.load(b"a", 21)
    assert content[21] == "a"
    saved.clear()
    assert b"a" not in saved
    assert b"c" not in saved


def test_only_the_last_places_that_fit_are_saved(kept: tuple[SavedStates, dict[int, str]]) -> None:
    saved, _ = kept
    assert saved.places(0, 31) == []
    assert saved.places(0, 64) == [32, 64]
    assert saved.places(0, 200) == [160, 192]
    assert saved.places(32, 64) == [64]


def test_a_prefix_ends_where_states_are_saved(kept: tuple[SavedStates, dict[int, str]]) -> None:
    saved, _ = kept
    prefixes = PrefixCache(BlockAllocator(20), 16, saved)
    tokens = drawn(9, 100)
    blocks = prefixes.take(7) or []
    prefixes.remember(blocks, tokens)
    assert prefixes.reuse(tokens) == []
    prefixes.save_states(blocks, tokens[:40], 10)  # no place
    assert prefixes.reuse(tokens) == []
    prefixes.save_states(blocks, tokens[:64], 10)
    assert prefixes.reuse(tokens) == blocks[:4]
    prefixes.clear()
    prefixes.save_states(blocks, tokens[:64], 10)  # which other weights computed
    assert prefixes.reuse(tokens) == []


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        ({}, r"\w+ keeps (matrix|tail) per sequence, and cache.saved_states gives no room"),
        ({"saved_states": 0}, "saved_states must be at least 1, not 0"),
        ({"saved_states": 2, "saved_states_interval": 24}, "24, no multiple of the block size 16"),
    ],
)
def test_a_budget_that_holds_nothing_is_refused(hybrid: Path, cache: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_runner(hybrid, saved=None, reuse_prefixes=True, **cache)
