"""Tests of generation on an asynchronous device, where the host reads the tokens of a step while the next one runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from helpers.reference import prompts
from helpers.step_calls import check_calls
from helpers.thorough import MODE, thorough
from torch import Tensor

import hal
from hal.errors import NumericsError
from hal.generation.choosing import choose

pytestmark = pytest.mark.usefixtures("one_thread")

PARAMS = [hal.SamplingParams(max_new_tokens=4 + 3 * row) for row in range(6)]  # They end at different steps.
SAMPLED = [attrs.evolve(each, temperature=0.8, top_k=40, seed=row) for row, each in enumerate(PARAMS)]
MIXED = [pair[row % 2] for row, pair in enumerate(zip(PARAMS, SAMPLED, strict=True))]
Open = Callable[..., hal.Runner]


@pytest.fixture
def opened(npu: Callable[..., hal.Backend], trained: Path) -> Open:
    def runner(compiler: str = "eager", num_tokens: int = 2048, **cache: Any) -> hal.Runner:
        backend = npu(
            dtype="float16",
            cache={"num_tokens": num_tokens, **cache},
            compilation={"compiler": compiler, "capture_sizes": [2, 8]},
        )
        return hal.Runner(hal.load_model(trained, backend), backend)

    return runner


def one_after_another(runner: hal.Runner, text: list[int], params: hal.SamplingParams) -> list[int]:
    """Generate alone, with a batch of lists in each step, which begins when the last token is on the host."""
    blocks = runner.blocks.take(runner.spec.blocks_for(len(text) + params.max_new_tokens)) or []
    found: list[int] = []
    while len(found) < params.max_new_tokens and not params.stop_token_ids.intersection(found):
        new, cached = ([found[-1]], len(text) + len(found) - 1) if found else (text, 0)
        logits = runner.step(runner.batch([new], [blocks], cached=[cached])).logits
        with torch.inference_mode():
            found += choose(logits, [params], [len(found)]).tolist()
    runner.blocks.give_back(blocks)
    return found


def together(tokens: Iterator[hal.Token], size: int) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(size)]
    for token in tokens:
        found[token.prompt_index].append(token.token_id)
    return found


class Counting:
    """Counts the rows of a runner's steps, and the tokens that were known when each step began."""

    def __init__(self, runner: hal.Runner, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows, self.known, self.known_at = 0, 0, list[int]()
        step = runner.step

        def counted(batch: hal.step.Batch) -> hal.StepOutput:
            self.rows += batch.num_sequences
            self.known_at.append(self.known)
            return step(batch)

        monkeypatch.setattr(runner, "step", counted)

    def read(self, tokens: Iterator[hal.Token]) -> Iterator[hal.Token]:
        for token in tokens:
            self.known += 1
            yield token


@thorough(MODE, r"\[(512-eager|2048-graph|\d+-npugraph_ex)")
@pytest.mark.parametrize("compiler", ["eager", "graph", "npugraph_ex"])
@pytest.mark.parametrize("num_tokens", [2048, 512])
def test_tokens_are_those_of_one_step_after_another(
    compiler: str, num_tokens: int, opened: Open, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, texts = opened(compiler, num_tokens), prompts(trained)[: len(MIXED)]
    free = runner.blocks.num_free
    whole = [one_after_another(runner, text, each) for text, each in zip(texts, MIXED, strict=True)]
    stopping = [
        attrs.evolve(each, stop_token_ids={tokens[len(tokens) // 2]} if row % 3 else ())
        for row, (each, tokens) in enumerate(zip(MIXED, whole, strict=True))
    ]
    expected = [one_after_another(runner, text, each) for text, each in zip(texts, stopping, strict=True)]
    stopped = sum(len(each) < len(all_) for each, all_ in zip(expected, whole, strict=True))
    assert stopped >= 2
    counting = Counting(runner, monkeypatch)
    assert together(hal.generate(runner, texts, stopping), len(texts)) == expected
    # A sequence that a stop token ends runs in one step too many, and no other does.
    assert counting.rows == sum(map(len, expected)) + stopped
    assert runner.blocks.num_free == free


def test_the_next_step_starts_before_the_last_tokens_are_read(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    counting = Counting(runner := opened(), monkeypatch)
    tokens = list(counting.read(hal.generate(runner, [[5, 6, 7]], hal.SamplingParams(max_new_tokens=5))))
    assert [each.finished for each in tokens] == [None] * 4 + ["length"]
    assert counting.known_at == [0, 0, 1, 2, 3]


@thorough(MODE, r"\[False")
@pytest.mark.parametrize("reuse", [False, True])
def test_prefixes_penalties_and_masks(reuse: bool, opened: Open, trained: Path) -> None:
    """Each prompt gets the tokens that it gets alone. A mask reads all tokens before the one that it masks."""
    runner = opened("graph", 1024, reuse_prefixes=reuse)
    words = -(-runner.model.vocab_size // 32)
    seen: list[tuple[int, ...]] = []

    def mask(generated: Sequence[int]) -> Tensor:
        seen.append(tuple(generated))
        assert 7 not in generated, "a sequence that has ended has no next token"
        allowed = torch.full((words,), -1, dtype=torch.int32)
        allowed[len(generated) % words] = 0
        if len(generated) == 5:  # nothing but the stop token
            allowed.zero_()
            allowed[0] = 1 << 7
        return allowed

    text = (prompts(trained)[2] * 9)[:270]  # more than two blocks
    texts = [text, text[:20], [*text, 9], prompts(trained)[4], text]
    params = [
        hal.SamplingParams(max_new_tokens=9, repetition_penalty=1.3, frequency_penalty=0.5),
        hal.SamplingParams(max_new_tokens=9, mask=mask, stop_token_ids={7}),
        hal.SamplingParams(max_new_tokens=7, temperature=0.9, seed=3, presence_penalty=1.0),
        hal.SamplingParams(max_new_tokens=12, mask=mask, stop_token_ids={7}, repetition_penalty=1.2),
        hal.SamplingParams(max_new_tokens=9),
    ]
    expected = [
        together(hal.generate(runner, [each], chosen), 1)[0] for each, chosen in zip(texts, params, strict=True)
    ]
    assert len(expected[1]) == len(expected[3]) == 6
    alone, seen[:] = sorted(seen), []
    assert together(hal.generate(runner, texts, params), len(texts)) == expected
    assert sorted(seen) == alone


def test_nan_is_refused_one_step_late(opened: Open) -> None:
    runner = opened("graph")
    free = runner.blocks.num_free
    steps = hal.generate(runner, [[5, 6], [7]], hal.SamplingParams())
    assert [next(steps).prompt_index, next(steps).prompt_index] == [0, 1]
    with torch.inference_mode():
        runner.model.get_parameter("model.norm.weight").fill_(float("nan"))
    with pytest.raises(NumericsError, match="prompt 0, 1"):
        list(steps)
    assert runner.blocks.num_free == free


def test_python_calls_of_a_token(npu: Callable[..., hal.Backend], trained: Path) -> None:
    backend = npu(compilation={"compiler": "graph", "capture_sizes": [1]})
    with hal.Runner(hal.load_model(trained, backend), backend) as runner:
        check_calls(runner)
