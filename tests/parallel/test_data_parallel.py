"""Tests of data parallelism: ranks that hold copies of a model share the prompts, and step together where they must."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import rank_programs
from helpers.ranks import failing, in_ranks

EXCHANGES = ["all_gather", "all_to_all", "dispatch"]


def _check(folder: Path, checkpoint: Path, parallel: dict[str, Any], compilers: list[str], **arguments: Any) -> None:
    """Assert that each rank gets the tokens that one process gives for every prompt."""
    arguments = {"checkpoint": str(checkpoint), "dtype": "float32", **arguments}
    alone = rank_programs.tokens(**arguments, compilers=["eager"], parallel={})["eager"]
    ranks = parallel.get("tensor", 1) * parallel["data"]
    found = in_ranks("tokens", ranks, folder, **arguments, compilers=compilers, parallel=parallel)
    for compiler in compilers:
        assert [rank[compiler] for rank in found] == [alone] * ranks, compiler


@pytest.mark.parametrize("sizes", [{"data": 2}, {"data": 2, "tensor": 2}, {"data": 4}])
def test_copies_share_the_prompts(trained: Path, tmp_path: Path, sizes: dict[str, int]) -> None:
    _check(tmp_path, trained, sizes, ["eager", "graph"])


@pytest.mark.parametrize("experts", EXCHANGES)
@pytest.mark.parametrize(
    ("sizes", "compilers"),
    [
        ({"data": 2}, ["eager", "graph", "piecewise"]),
        ({"data": 4}, ["graph"]),
        ({"data": 2, "tensor": 2}, ["graph", "piecewise"]),
    ],
)
def test_copies_share_the_experts(
    trained_experts: Path, tmp_path: Path, experts: str, sizes: dict[str, int], compilers: list[str]
) -> None:
    _check(tmp_path, trained_experts, {**sizes, "experts": experts}, compilers)


@pytest.mark.parametrize("experts", EXCHANGES)
def test_a_rank_without_a_prompt_steps_too(trained_experts: Path, tmp_path: Path, experts: str) -> None:
    _check(tmp_path, trained_experts, {"data": 2, "experts": experts}, ["graph"], prompts=1)


def test_a_rank_that_ends_while_another_waits(trained_experts: Path, tmp_path: Path) -> None:
    parallel = {"data": 2, "experts": "all_gather", "timeout": 20}
    failure = failing("ends_early", 2, tmp_path, checkpoint=str(trained_experts), parallel=parallel, into=str(tmp_path))
    assert failure is not None
    assert (failure.rank, failure.status) == (0, -9)
    kind, text, *_ = (tmp_path / "error.txt").read_text(encoding="utf-8").split("\n")
    assert kind == "CommunicationError"
    assert "rank 1 of 2 could not agree on the next step" in text
