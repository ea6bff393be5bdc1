"""Tests for generation: a prompt's tokens depend only on the prompt and its parameters. Also tests block allocation."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any, cast

import attrs
import pytest
import torch
from helpers.reference import open_runner, prompts
from helpers.thorough import DRAW, MODE, thorough
from hypothesis import given
from hypothesis import strategies as st

import hal
from hal.checkpoint.checkpoint import Checkpoint
from hal.errors import BatchError, ConfigError, NumericsError
from hal.step.block_allocator import BlockAllocator
from hal.step.fields import DUMMY_BLOCK

GREEDY = [hal.SamplingParams(max_new_tokens=8 + 3 * row) for row in range(8)]  # They end at different steps.
SAMPLED = [
    attrs.evolve(each, temperature=0.8, top_k=40, top_p=0.95, min_p=0.02, seed=row) for row, each in enumerate(GREEDY)
]
MIXED = [pair[row % 2] for row, pair in enumerate(zip(GREEDY, SAMPLED, strict=True))]
LONG = 2048
"""Cache tokens for all prompts at once."""
SHORT = 112
"""Cache tokens for any one prompt, but not for all at once."""

Params = Sequence[hal.SamplingParams]


@pytest.fixture(scope="module")
def texts(trained: Path) -> list[list[int]]:
    return prompts(trained)


def together(runner: hal.Runner, texts: Sequence[Sequence[int]], params: Params) -> list[list[int]]:
    """Return each prompt's new tokens; check ``finished`` at each step."""
    made: list[list[int]] = [[] for _ in texts]
    ended: dict[int, str] = {}
    for token in hal.generate(runner, texts, params):
        assert token.prompt_index not in ended
        made[token.prompt_index].append(token.token_id)
        if token.finished:
            ended[token.prompt_index] = token.finished
    for row, each in enumerate(params):
        stopped = made[row][-1] in each.stop_token_ids
        assert ended[row] == ("stop" if stopped else "length")
        assert stopped or len(made[row]) == each.max_new_tokens
        assert not each.stop_token_ids.intersection(made[row][:-1])
    return made


def alone(runner: hal.Runner, texts: Sequence[Sequence[int]], params: Params) -> list[list[int]]:
    return [together(runner, [text], [each])[0] for text, each in zip(texts, params, strict=True)]


def test_tokens_may_outlive_their_runner(trained: Path, texts: list[list[int]]) -> None:
    with open_runner(trained) as runner:
        tokens = iter(hal.generate(runner, texts, GREEDY))
        assert next(tokens).prompt_index == 0
    assert runner.closed
    cast("Generator[hal.Token]", tokens).close()


@pytest.mark.parametrize(("compiler", "num_tokens"), [("eager", SHORT), ("graph", LONG)])
def test_a_batch_changes_nothing(compiler: str, num_tokens: int, trained: Path, texts: list[list[int]]) -> None:
    expected = alone(open_runner(trained), texts, MIXED)
    runner = open_runner(trained, compiler, num_tokens=num_tokens, block_size=4)
    assert together(runner, texts, MIXED) == expected
    assert alone(runner, texts, MIXED) == expected


def test_prompts_wait_for_room(trained: Path, texts: list[list[int]]) -> None:
    runner = open_runner(trained, num_tokens=SHORT, block_size=4)
    events = list(hal.generate(runner, texts, GREEDY))
    firsts = [next(place for place, each in enumerate(events) if each.prompt_index == row) for row in range(len(texts))]
    ends = [place for place, each in enumerate(events) if each.finished]
    assert firsts == sorted(firsts)  # In the order of the prompts.
    assert min(ends) < firsts[-1]


@thorough(DRAW, r"\[(5|40)\]")
@pytest.mark.parametrize("most", [5, 17, 40])
def test_prompts_join_a_step_while_it_holds_them(
    most: int, trained: Path, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer prompts take several steps."""
    runner = open_runner(trained)
    expected = together(runner, texts, GREEDY)
    assert max(map(len, texts)) > 17
    runner.backend.configure(attrs.evolve(runner.backend.config, max_prefill_tokens=most))
    steps: list[list[int]] = []
    step = runner.step

    def noted(batch: hal.step.Batch) -> hal.StepOutput:
        lengths = batch.query_start_loc_host.diff()
        if torch.equal(batch.kv_lens_host, lengths):  # prompts' tokens; none is cached
            steps.append(lengths.tolist())
        return step(batch)

    monkeypatch.setattr(runner, "step", noted)
    assert together(runner, texts, GREEDY) == expected
    assert sum(map(sum, steps)) == sum(map(len, texts))
    assert all(sum(each) <= most or len(each) == 1 for each in steps)
    # The next prompt would not have fitted in any step.
    assert all(sum(each) + following[0] > most for each, following in pairwise(steps))


@thorough(MODE, r"\[(greedy-eager|sampled-graph)")
@pytest.mark.parametrize("compiler", ["eager", "graph"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_stop_tokens(params: Params, compiler: str, trained: Path, texts: list[list[int]]) -> None:
    runner = open_runner(trained, compiler, num_tokens=SHORT, block_size=4)
    whole = together(runner, texts, params)
    stops = [tokens[len(tokens) // 2] for tokens in whole]
    stopping = [
        attrs.evolve(each, stop_token_ids=frozenset({stop})) if row % 4 else each  # Some reach their maximum length.
        for row, (each, stop) in enumerate(zip(params, stops, strict=True))
    ]
    expected = [
        tokens[: tokens.index(stop) + 1] if row % 4 else tokens
        for row, (tokens, stop) in enumerate(zip(whole, stops, strict=True))
    ]
    assert together(runner, texts, stopping) == expected


@pytest.mark.parametrize(
    ("generation", "expected"),
    [('{"eos_token_id": null}', {7}), ("{}", {7}), (None, {7}), ('{"eos_token_id": [1, 2]}', {1, 2})],
)
def test_stop_tokens_of_either_file(generation: str | None, expected: set[int], tmp_path: Path) -> None:
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(generation, encoding="utf-8")
    assert Checkpoint(tmp_path, {"eos_token_id": 7}, {}).stop_token_ids == expected


def test_seeds(trained: Path, texts: list[list[int]]) -> None:
    runner = open_runner(trained)
    params = [hal.SamplingParams(max_new_tokens=20, temperature=1.0, seed=seed) for seed in (1, 2, 3, 2**62, 1)]
    made = together(runner, [texts[2]] * 5, params)
    assert made[0] == made[4]
    assert len(set(map(tuple, made))) == 4


def test_a_temperature_near_0_is_greedy(trained: Path, texts: list[list[int]]) -> None:
    runner = open_runner(trained)
    cold = [attrs.evolve(each, temperature=1e-6, seed=7) for each in GREEDY]
    assert together(runner, texts, cold) == together(runner, texts, GREEDY)


def test_one_for_all(trained: Path, texts: list[list[int]]) -> None:
    runner, params = open_runner(trained), hal.SamplingParams(max_new_tokens=3)
    assert list(hal.generate(runner, texts, params)) == list(hal.generate(runner, texts, [params] * len(texts)))
    assert list(hal.generate(runner, [], params)) == []


def test_the_models_length_ends_a_text(trained: Path, caplog: pytest.LogCaptureFixture) -> None:
    runner = open_runner(trained)
    events = list(hal.generate(runner, [[5] * (runner.model.max_length - 3)], hal.SamplingParams(max_new_tokens=10)))
    assert [each.finished for each in events] == [None, None, "length"]
    assert "3 new tokens, not 10" in caplog.text


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([], "prompt 1 is empty"),
        ([-1], "token id"),
        ([1 << 20], "token id"),
        ([5] * 1024, "1024 tokens; with"),
        ([5] * 200, "cache holds 112"),
    ],
)
def test_wrong_prompts_are_named_before_the_first_step(wrong: list[int], message: str, trained: Path) -> None:
    runner = open_runner(trained, num_tokens=SHORT)
    with pytest.raises(BatchError, match=message):
        hal.generate(runner, [[5], wrong], hal.SamplingParams(max_new_tokens=3))


def test_as_many_parameters_as_prompts(trained: Path) -> None:
    with pytest.raises(BatchError, match="2 prompts and 1 params"):
        hal.generate(open_runner(trained), [[5], [6]], [hal.SamplingParams()])


@pytest.mark.parametrize("wrong", [None, [None], 3, {"temperature": 1}, [{"temperature": 1}]])
def test_parameters_that_are_none(wrong: Any, trained: Path) -> None:
    with pytest.raises(ConfigError, match=r"params is .*\n.*give hal.SamplingParams"):
        hal.generate(open_runner(trained), [[5]], wrong)


@pytest.mark.parametrize("compiler", ["eager", "graph"])
def test_nan_is_refused(compiler: str, trained: Path) -> None:
    runner = open_runner(trained, compiler)
    steps = hal.generate(runner, [[5, 6], [7]], hal.SamplingParams())
    assert [next(steps).prompt_index, next(steps).prompt_index] == [0, 1]
    with torch.inference_mode():
        runner.model.get_parameter("model.norm.weight").fill_(math.nan)
    with pytest.raises(NumericsError, match="prompt 0, 1"):
        next(steps)


@given(
    st.integers(1, 24),
    st.lists(st.one_of(st.tuples(st.just("take"), st.integers(1, 8)), st.tuples(st.just("give"), st.integers(0, 30)))),
)
def test_block_allocator(num_blocks: int, actions: list[tuple[str, int]]) -> None:
    allocator = BlockAllocator(num_blocks)
    free, taken = set(range(num_blocks)) - {DUMMY_BLOCK}, []
    for action, number in actions:
        if action == "take":
            blocks = allocator.take(number)
            if len(free) < number:
                assert blocks is None
            else:
                assert blocks is not None
                assert len(blocks) == len(set(blocks)) == number
                assert free.issuperset(blocks)
                if any(free.issuperset(range(first, first + number)) for first in free):
                    assert blocks == list(range(blocks[0], blocks[0] + number))
                free.difference_update(blocks)
                taken.append(blocks)
        elif taken:
            blocks = taken.pop(number % len(taken))
            allocator.give_back(blocks)
            free.update(blocks)
        assert allocator.num_free == len(free)


def test_two_at_once_on_one_runner_do_not_share_blocks(trained: Path, texts: list[list[int]]) -> None:
    runner = open_runner(trained)
    expected = [together(runner, texts[:4], GREEDY[:4]), together(runner, texts[4:], GREEDY[4:])]
    made: list[list[list[int]]] = [[[] for _ in range(4)] for _ in range(2)]
    first, second = hal.generate(runner, texts[:4], GREEDY[:4]), hal.generate(runner, texts[4:], GREEDY[4:])
    for pair in zip_longest(first, second):
        for tokens, token in zip(made, pair, strict=True):
            if token is not None:
                tokens[token.prompt_index].append(token.token_id)
    assert made == expected


def test_no_room_because_of_another_is_an_error(trained: Path, texts: list[list[int]]) -> None:
    runner = open_runner(trained, num_tokens=SHORT, block_size=4)
    first = hal.generate(runner, texts, GREEDY)
    next(first)
    with pytest.raises(BatchError, match="other sequences hold its blocks"):
        list(hal.generate(runner, [[5] * 60], hal.SamplingParams(max_new_tokens=40)))
    assert len(list(first)) + 1 == sum(each.max_new_tokens for each in GREEDY)


@pytest.mark.parametrize("steps", [1, 5, 30])
def test_stopping_early_gives_the_blocks_back(steps: int, trained: Path, texts: list[list[int]]) -> None:
    runner = open_runner(trained, num_tokens=SHORT, block_size=4)
    free = runner.blocks.num_free
    tokens = hal.generate(runner, texts, GREEDY)
    for _ in range(steps):
        next(tokens)
    assert runner.blocks.num_free < free
    tokens.close()  # type: ignore[attr-defined]
    assert runner.blocks.num_free == free


@pytest.mark.parametrize("prompt", ["abc", [1.5], 5, [None], [True]])
def test_prompts_must_be_token_ids(prompt: Any, trained: Path) -> None:
    with pytest.raises(BatchError, match="list of token ids"):
        hal.generate(open_runner(trained), [prompt], hal.SamplingParams())


def test_any_iterable_of_prompts_will_do(trained: Path, texts: list[list[int]]) -> None:
    runner, nothing = open_runner(trained), cast(Any, None)
    found = list(hal.generate(runner, cast(Any, iter(texts)), hal.SamplingParams(max_new_tokens=2)))
    assert found == list(hal.generate(runner, texts, hal.SamplingParams(max_new_tokens=2)))
    with pytest.raises(BatchError, match="prompts is None"):
        hal.generate(runner, nothing, hal.SamplingParams())


def test_blocks_given_back_twice_are_noticed() -> None:
    allocator = BlockAllocator(8)
    assert allocator.take(0) == []
    blocks = allocator.take(3) or []
    allocator.give_back(blocks)
    with pytest.raises(ValueError, match="freed twice"):
        allocator.give_back(blocks[1:2])


@pytest.mark.parametrize("blocks", [[1, 1], [0], [2], [99], [1, 2]], ids=str)
def test_blocks_that_are_not_out_are_refused_whole(blocks: list[int]) -> None:
    allocator = BlockAllocator(4)
    assert allocator.take(1) == [1]
    with pytest.raises(ValueError, match="or never allocated"):
        allocator.give_back(blocks)
    allocator.give_back([1])
    assert allocator.take(3) == [1, 2, 3]
    assert allocator.take(1) is None
