"""Tests that requests may join and leave a scheduler while others run."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import pytest
from helpers.reference import open_runner, prompts
from helpers.step_calls import check_calls
from helpers.thorough import MODE, thorough

import hal
from hal.generation.request import Request, Token, checked
from hal.generation.scheduler import Scheduler


def alone(runner: hal.Runner, prompt: list[int], params: hal.SamplingParams) -> list[int]:
    return [token.token_id for token in hal.generate(runner, [prompt], params)]


@thorough(MODE, r"\[2048")
@pytest.mark.parametrize(("num_tokens", "compiler"), [(96, "graph"), (2048, "eager")])
def test_requests_join_and_leave_while_others_run(compiler: str, num_tokens: int, trained: Path) -> None:
    seed = random.randrange(1 << 30)
    logging.getLogger("tests").info("seed %d", seed)
    draw = random.Random(seed)
    texts, runner = prompts(trained), open_runner(trained, compiler, num_tokens=num_tokens, block_size=4)
    free = runner.blocks.num_free
    scheduler = Scheduler(runner, max_requests=5, max_length=90)
    requests: list[Request] = []
    found: dict[int, list[Token]] = {}
    cancelled: set[int] = set()
    while len(requests) < 24 or not scheduler.idle:
        if len(requests) < 24 and draw.random() < 0.5:
            params = hal.SamplingParams(
                max_new_tokens=draw.randrange(1, 20),
                temperature=draw.choice([0.0, 0.9]),
                seed=len(requests),
                frequency_penalty=draw.choice([0.0, 0.5]),
            )
            requests.append(checked(runner, len(requests), draw.choice(texts), params))
            scheduler.add(requests[-1])
        if requests and (draw.random() < 0.1 or (len(requests) == 12 and not cancelled)):
            dropped = draw.choice(requests)
            if not dropped.ended:
                cancelled.add(dropped.prompt_index)
            scheduler.cancel(dropped)
        for _, token in scheduler.step():
            assert token.prompt_index not in cancelled
            found.setdefault(token.prompt_index, []).append(token)
    assert cancelled
    assert len(cancelled) < 24
    assert runner.blocks.num_free == free
    for request in requests:
        tokens = [token.token_id for token in found.get(request.prompt_index, [])]
        expected = alone(runner, request.tokens[: request.length], request.params)
        if request.prompt_index in cancelled:
            assert tokens == expected[: len(tokens)]
        else:
            assert tokens == expected
            assert found[request.prompt_index][-1].finished == "length"


def test_a_request_joins_before_others_end(trained: Path) -> None:
    texts, runner = prompts(trained), open_runner(trained)
    scheduler = Scheduler(runner)
    scheduler.add(checked(runner, 0, texts[0], hal.SamplingParams(max_new_tokens=20)))
    for _ in range(5):
        scheduler.step()
    scheduler.add(checked(runner, 1, texts[1], hal.SamplingParams(max_new_tokens=2)))
    order = []
    while not scheduler.idle:
        order += [token.prompt_index for _, token in scheduler.step() if token.finished]
    assert order == [1, 0]


def test_closing_frees_what_requests_hold(trained: Path) -> None:
    texts, runner = prompts(trained), open_runner(trained)
    free = runner.blocks.num_free
    scheduler = Scheduler(runner, max_requests=2)
    for index, text in enumerate(texts):
        scheduler.add(checked(runner, index, text, hal.SamplingParams()))
    scheduler.step()
    assert runner.blocks.num_free < free
    scheduler.close()
    assert scheduler.idle
    assert runner.blocks.num_free == free


def test_python_calls_of_a_token(trained: Path) -> None:
    """The host calls few functions for a token, apart from the CPU's kernels, which a replay runs."""
    backend = hal.open({"backend": "cpu", "compilation": {"compiler": "graph", "capture_sizes": [1]}})
    with backend, hal.Runner(hal.load_model(trained, backend), backend) as runner:
        check_calls(runner, without="backends.cpu")
