"""Tests of models that ranks split between emulated NPUs: the same tokens as one NPU's, in every mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import rank_programs
from helpers.ranks import in_ranks

NPU = {"backend": "npu", "options": {"emulator": "on"}}
ALL = ["eager", "graph", "piecewise", "npugraph_ex"]


@pytest.mark.parametrize(
    ("name", "compilers"),
    [
        ("trained", ["eager", "graph"]),
        ("trained", ["piecewise", "npugraph_ex"]),
        ("trained_experts", ALL),
    ],
)
def test_the_same_tokens(request: pytest.FixtureRequest, tmp_path: Path, name: str, compilers: list[str]) -> None:
    arguments: dict[str, Any] = {"checkpoint": str(request.getfixturevalue(name)), "dtype": "float16"}
    alone = rank_programs.tokens(**arguments, compilers=["eager"], parallel={}, on={"backend": "npu"})["eager"]
    found = in_ranks("tokens", 2, tmp_path, **arguments, compilers=compilers, parallel={"tensor": 2}, on=NPU)
    for compiler in compilers:
        assert [rank[compiler] for rank in found] == [alone] * 2, compiler


@pytest.mark.parametrize(
    ("parallel", "compilers"),
    [
        ({"tensor": 2, "experts": "dispatch"}, ["graph"]),
        ({"tensor": 2, "experts": "all_gather"}, ALL),
        ({"tensor": 2, "experts": "all_to_all"}, ALL),
        ({"tensor": 2, "experts": "dispatch"}, ALL),
        ({"data": 2, "experts": "all_gather"}, ALL),
        ({"data": 2, "experts": "all_to_all"}, ALL),
        ({"data": 2, "experts": "dispatch"}, ALL),
    ],
    ids=str,
)
def test_whole_experts_on_each_rank(
    trained_experts: Path, tmp_path: Path, parallel: dict[str, Any], compilers: list[str]
) -> None:
    arguments: dict[str, Any] = {"checkpoint": str(trained_experts), "dtype": "float16"}
    alone = rank_programs.tokens(**arguments, compilers=["eager"], parallel={}, on={"backend": "npu"})["eager"]
    found = in_ranks("tokens", 2, tmp_path, **arguments, compilers=compilers, parallel=parallel, on=NPU)
    for compiler in compilers:
        assert [rank[compiler] for rank in found] == [alone] * 2, compiler
