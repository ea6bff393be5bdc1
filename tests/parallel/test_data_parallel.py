"""Tests of data parallelism: ranks that hold copies of a model share the prompts, and step together where they must."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from helpers import rank_programs
from helpers.rank_processes import LOST, run
from helpers.ranks import in_ranks
from helpers.thorough import MODE

import hal
from hal.errors import CommunicationError

EXCHANGES = ["all_gather", "all_to_all", "dispatch"]


def _check(checkpoint: Path, parallel: dict[str, Any], compilers: list[str], **more: Any) -> None:
    """Assert that each rank gets the tokens that one process gives for every prompt."""
    arguments = {"checkpoint": str(checkpoint), "dtype": "float32", **more}
    alone = rank_programs.tokens(**arguments, compilers=["eager"], parallel={})["eager"]
    ranks = parallel.get("tensor", 1) * parallel["data"]
    found = in_ranks("tokens", ranks, **arguments, compilers=compilers, parallel=parallel)
    for compiler in compilers:
        assert [each[compiler] for each in found] == [alone] * ranks, compiler


@pytest.mark.parametrize(
    "sizes",
    [
        {"data": 2},
        pytest.param({"data": 2, "tensor": 2}, marks=pytest.mark.thorough(MODE)),
        pytest.param({"data": 4}, marks=pytest.mark.thorough(MODE)),
    ],
)
def test_copies_share_the_prompts(trained: Path, sizes: dict[str, int]) -> None:
    _check(trained, sizes, ["graph"])


@pytest.mark.parametrize(
    ("sizes", "experts", "compilers"),
    [
        ({"data": 2}, "all_gather", ["graph"]),
        *(
            pytest.param(sizes, experts, compilers, marks=pytest.mark.thorough(MODE))
            for experts in EXCHANGES
            for sizes, compilers in (
                ({"data": 2}, ["eager", "graph", "piecewise"]),
                ({"data": 4}, ["graph"]),
                ({"data": 2, "tensor": 2}, ["graph", "piecewise"]),
            )
        ),
    ],
)
def test_copies_share_the_experts(
    trained_experts: Path, experts: str, sizes: dict[str, int], compilers: list[str]
) -> None:
    _check(trained_experts, {**sizes, "experts": experts}, compilers)


@pytest.mark.parametrize(
    "experts", ["dispatch", *(pytest.param(each, marks=pytest.mark.thorough(MODE)) for each in EXCHANGES[:2])]
)
def test_a_rank_without_a_prompt_steps_too(trained_experts: Path, experts: str) -> None:
    _check(trained_experts, {"data": 2, "experts": experts}, ["graph"], prompts=1)


def _ends_early(rank: int, checkpoint: str) -> None:
    parallel = {"data": 2, "experts": "all_gather", "timeout": 20}
    with hal.open({"backend": "cpu", "dtype": "float32", "parallel": parallel}) as backend:
        model = hal.load_model(checkpoint, backend)
        with hal.Runner(model, backend) as runner:
            if rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            runner.idle()


def test_a_rank_that_ends_while_another_waits(trained_experts: Path) -> None:
    killed, waiting = run(_ends_early, 2, str(trained_experts))
    assert killed == LOST
    assert isinstance(waiting, CommunicationError)
    assert "rank 1 of 2 could not agree on the next step" in str(waiting)


def test_copies_that_do_not_exchange_tokens_are_not_idle_together(trained: Path, cpu: hal.Backend) -> None:
    with hal.Runner(hal.load_model(trained, cpu), cpu) as runner:
        assert not runner.idle()
