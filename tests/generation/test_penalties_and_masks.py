"""Tests for penalties and masks in generation, against a loop over steps that penalizes in Python."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from helpers.penalizing import by_hand, mask_of, together
from helpers.reference import open_runner, prompts
from helpers.thorough import DRAW, EXHAUSTIVE, MODE, thorough
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import hal
from hal.checkpoint.checkpoint import Checkpoint
from hal.errors import ConfigError, HalError
from hal.generation.logits_processing import PenaltyTable

PLAIN = hal.SamplingParams(max_new_tokens=14)
PENALIZED = attrs.evolve(PLAIN, repetition_penalty=1.2, frequency_penalty=0.6, presence_penalty=-0.4)
SAMPLED = attrs.evolve(PENALIZED, temperature=0.9, top_k=50, frequency_penalty=1.5, seed=3)
PENALTIES = ({"repetition_penalty": 1.4}, {"frequency_penalty": 1.1}, {"presence_penalty": 2.0}, {})


@pytest.fixture(scope="module")
def texts(trained: Path) -> list[list[int]]:
    return prompts(trained)[:6]


def each_params() -> list[hal.SamplingParams]:
    """Return parameters that end at different steps, with each penalty alone, with all, with none."""
    several = [PENALIZED, PLAIN, SAMPLED, *(attrs.evolve(PLAIN, **each) for each in PENALTIES[:3])]
    return [attrs.evolve(each, max_new_tokens=8 + 3 * row) for row, each in enumerate(several)]


@thorough(EXHAUSTIVE, r"\[params[2-5]")  # The second has all, and batches have each.
@pytest.mark.parametrize("params", [PENALIZED, SAMPLED, *(attrs.evolve(PLAIN, **each) for each in PENALTIES)])
def test_penalties_are_those_of_a_loop(params: hal.SamplingParams, trained: Path, texts: list[list[int]]) -> None:
    runner = open_runner(trained)
    expected = [by_hand(runner, text, params) for text in texts]
    assert together(runner, texts, [params] * len(texts)) == expected
    assert (expected == [by_hand(runner, text, PLAIN) for text in texts]) is (params == PLAIN)


@pytest.mark.parametrize(("compiler", "num_tokens"), [("eager", 112), ("graph", 2048)])
def test_a_batch_changes_nothing(compiler: str, num_tokens: int, trained: Path, texts: list[list[int]]) -> None:
    """Prompts with and without penalties; with a small cache, some wait for others, whose rows they take."""
    params = each_params()
    expected = [together(open_runner(trained), [text], [each])[0] for text, each in zip(texts, params, strict=True)]
    assert together(open_runner(trained, compiler, num_tokens=num_tokens, block_size=4), texts, params) == expected


@thorough(DRAW, r"\[seed=[12]")
@pytest.mark.parametrize("seed", range(3), ids="seed={}".format)
def test_rows_of_the_table_are_reused(seed: int, trained: Path, texts: list[list[int]]) -> None:
    """Twenty prompts, of which few fit the cache, so that rows change hands."""
    pick = random.Random(seed)
    several = [pick.choice(texts) for _ in range(20)]
    params = [attrs.evolve(pick.choice(each_params()), max_new_tokens=pick.randint(1, 9)) for _ in several]
    runner = open_runner(trained)
    expected = [together(runner, [text], [each])[0] for text, each in zip(several, params, strict=True)]
    assert together(open_runner(trained, num_tokens=112, block_size=4), several, params) == expected


def test_few_rows_serve_many_prompts(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []

    class Noted(PenaltyTable):
        def add(self, prompt: Sequence[int], params: hal.SamplingParams) -> int:
            rows.append(super().add(prompt, params))
            return rows[-1]

    monkeypatch.setattr("hal.generation.choosing.PenaltyTable", Noted)
    runner = open_runner(trained, num_tokens=112, block_size=4)  # at most two at once
    together(runner, [[5] * 40] * 12, [PENALIZED] * 12)
    together(runner, [[5]], [PLAIN])  # makes no table
    assert len(rows) == 12
    assert set(rows) == {1, 2}


def test_a_reused_prefix_counts_as_prompt(trained: Path) -> None:
    prompt = list(range(40, 80))
    params = attrs.evolve(PLAIN, repetition_penalty=1.5)
    plain = together(open_runner(trained), [prompt], [params])
    config = {
        "backend": "cpu",
        "dtype": "float32",
        "cache": {"num_tokens": 512, "block_size": 4, "reuse_prefixes": True},
    }
    backend = hal.open(config)
    runner = hal.Runner(hal.load_model(trained, backend), backend)
    assert together(runner, [prompt], [params]) == plain
    assert runner.prefixes is not None
    shared = runner.prefixes.reuse(prompt[:-1])
    assert shared, "nothing to reuse"
    runner.prefixes.give_back(shared)
    assert together(runner, [prompt], [params]) == plain


class Calls(TorchDispatchMode):
    """Counts the calls of torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def step_calls(tokens: Iterator[hal.Token], count: int) -> Counter[str]:
    """Return the calls of the steps that give the next tokens."""
    with Calls() as calls:
        for _ in range(count):
            next(tokens)
    return calls.counts


def test_a_step_without_penalties_and_masks_does_nothing_more(trained: Path) -> None:
    """Even after one that had them, in the same generation."""
    runner = open_runner(trained)
    plain = iter(hal.generate(runner, [[5, 6], [7, 8]], PLAIN))
    for _ in range(4):
        next(plain)
    expected = step_calls(plain, 2)

    def anything(generated: Sequence[int]) -> Tensor:
        return torch.full((-(-runner.model.vocab_size // 32),), -1, dtype=torch.int32)

    short = attrs.evolve(PENALIZED, max_new_tokens=1, mask=anything)
    mixed = iter(hal.generate(runner, [[5, 6], [7, 8], [9]], [PLAIN, PLAIN, short]))
    first = step_calls(mixed, 3)
    assert first.keys() - expected.keys()
    for _ in range(2):
        next(mixed)
    assert step_calls(mixed, 2) == expected


def test_counts_are_updated_and_not_made_anew(trained: Path) -> None:
    """A step with penalties makes as many calls after many tokens as after few."""
    runner = open_runner(trained)
    tokens = iter(hal.generate(runner, [[5, 6], [7, 8]], attrs.evolve(PENALIZED, max_new_tokens=40)))
    for _ in range(6):
        next(tokens)
    early = step_calls(tokens, 2)
    for _ in range(60):
        next(tokens)
    assert step_calls(tokens, 2) == early
    assert early["aten.index_put_.default"] == 1


class Automaton:
    """Accepts the words that alternate between two sets of tokens, then a stop token: ``(ab)*`` and stop."""

    def __init__(self, vocab_size: int, stop: int, length: int) -> None:
        self.sets = [list(range(3, vocab_size, 7)), list(range(5, vocab_size, 7))]
        self.vocab_size, self.stop, self.length = vocab_size, stop, length
        self.calls: list[list[int]] = []

    def allowed(self, generated: Sequence[int]) -> list[int]:
        return [self.stop] if len(generated) == self.length else self.sets[len(generated) % 2]

    def __call__(self, generated: Sequence[int]) -> Tensor:
        self.calls.append(list(generated))
        return mask_of(self.allowed(generated), self.vocab_size)

    def __len__(self) -> int:
        """Return 0: an object that is false is a mask, too."""
        return 0


@thorough(MODE, r"\[penalized-eager")
@thorough(EXHAUSTIVE, r"\[(greedy|sampled)-graph")
@pytest.mark.parametrize("compiler", ["eager", "graph"])
@pytest.mark.parametrize("base", [PLAIN, PENALIZED, SAMPLED], ids=["greedy", "penalized", "sampled"])
def test_an_automaton_restricts_the_text(
    base: hal.SamplingParams, compiler: str, trained: Path, texts: list[list[int]]
) -> None:
    (stop,) = Checkpoint.open(trained).stop_token_ids
    runner = open_runner(trained, compiler)
    automata = [Automaton(runner.model.vocab_size, stop, length) for length in (0, 5, 8)]
    free = attrs.evolve(base, max_new_tokens=10, stop_token_ids={stop})
    params = [attrs.evolve(free, mask=each) for each in automata] + [free]
    made = together(runner, texts[:4], params)
    for automaton, tokens in zip(automata, made[:3], strict=True):
        assert len(tokens) == automaton.length + 1
        assert automaton.calls == [tokens[:step] for step in range(len(tokens))]
        assert all(token in automaton.allowed(tokens[:step]) for step, token in enumerate(tokens))
    assert made[3] == together(open_runner(trained), [texts[3]], [free])[0]
    if base is PLAIN:
        alone = [together(runner, [text], [each])[0] for text, each in zip(texts, params, strict=False)]
        assert made == alone


def test_among_allowed_tokens_the_penalized_logits_decide(trained: Path) -> None:
    """Two tokens are allowed: the penalty of each outweighs the logits, so they alternate."""
    runner = open_runner(trained)
    params = hal.SamplingParams(
        max_new_tokens=8, frequency_penalty=2.0, mask=lambda generated: mask_of([5, 9], runner.model.vocab_size)
    )
    made = together(runner, [[5, 6, 7]], [params])[0]
    plain = together(runner, [[5, 6, 7]], [attrs.evolve(params, frequency_penalty=0.0)])[0]
    assert set(made) == {5, 9}
    assert made != plain
    assert set(plain) <= {5, 9}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda words: None, "returned None"),
        (lambda words: [-1] * words, r"returned \[-1, -1"),
        (lambda words: torch.full((words,), -1), r"returned int64\["),
        (lambda words: torch.full((words + 1,), -1, dtype=torch.int32), r"returned int32\["),
        (lambda words: torch.full((1, words), -1, dtype=torch.int32), r"returned int32\[1, "),
        (lambda words: torch.full((words,), -1, dtype=torch.int32, device="meta"), "on meta"),
        (lambda words: torch.zeros(words, dtype=torch.int32), "allows no token after 0 new tokens"),
    ],
)
def test_what_a_mask_may_not_return(given: Any, message: str, trained: Path) -> None:
    runner = open_runner(trained)
    words, free = -(-runner.model.vocab_size // 32), runner.blocks.num_free
    params = [PLAIN, attrs.evolve(PLAIN, mask=lambda generated: given(words))]
    with pytest.raises(ConfigError, match=f"the mask of prompt 1 .*{message}"):
        list(hal.generate(runner, [[5], [6]], params))
    assert runner.blocks.num_free == free


def test_only_bits_of_the_vocabulary_count() -> None:
    from hal.generation.logits_processing import allowed_tokens

    def beyond(generated: Sequence[int]) -> Tensor:
        return torch.tensor([0, -(2**5)], dtype=torch.int32)

    with pytest.raises(HalError, match="prompt 7 allows no token"):
        allowed_tokens(7, beyond, [], 37)
    assert allowed_tokens(7, beyond, [], 38).tolist() == [0, -(2**5)]
    for words in (1, 2):

        def last(generated: Sequence[int], words: int = words) -> Tensor:
            return torch.tensor([0] * (words - 1) + [-(2**31)]).int()

        assert allowed_tokens(0, last, [], 32 * words)[-1] == -(2**31)


def test_an_error_of_a_mask_comes_out(trained: Path) -> None:
    runner = open_runner(trained)
    free = runner.blocks.num_free

    def fails(generated: Sequence[int]) -> Tensor:
        raise ZeroDivisionError(len(generated))

    with pytest.raises(ZeroDivisionError):
        list(hal.generate(runner, [[5, 6]], attrs.evolve(PLAIN, mask=fails)))
    assert runner.blocks.num_free == free
