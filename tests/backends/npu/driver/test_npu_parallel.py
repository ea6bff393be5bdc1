"""Tests of models that ranks split between emulated NPUs: the same tokens as one NPU's, in every mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import rank_programs
from helpers.ranks import started

NPU = {"backend": "npu", "options": {"emulator": "on"}}


@pytest.mark.parametrize(
    ("name", "compilers"),
    [
        ("trained", ["eager", "graph"]),
        ("trained", ["piecewise", "npugraph_ex"]),
        ("trained_experts", ["eager", "graph", "piecewise", "npugraph_ex"]),
    ],
)
def test_the_same_tokens(request: pytest.FixtureRequest, tmp_path: Path, name: str, compilers: list[str]) -> None:
    arguments: dict[str, Any] = {"checkpoint": str(request.getfixturevalue(name)), "dtype": "float16"}
    alone = rank_programs.tokens(**arguments, compilers=["eager"], parallel={}, on={"backend": "npu"})["eager"]
    found = started("tokens", 2, tmp_path, **arguments, compilers=compilers, parallel={"tensor": 2}, on=NPU)
    for compiler in compilers:
        assert [rank[compiler] for rank in found] == [alone] * 2, compiler
