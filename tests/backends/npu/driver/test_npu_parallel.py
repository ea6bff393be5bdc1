"""Tests of models that ranks split between emulated NPUs: the same tokens as one NPU's, in every mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hal.backends.npu.kernels.dispatch import serves
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


@pytest.mark.parametrize(("width", "native"), [(1024, True), (512, False)])
def test_dispatch_and_combine_of_an_a3(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, width: int, native: bool
) -> None:
    """Rows of a documented width take one launch in each direction."""
    monkeypatch.setenv("HAL_NPU_EMULATOR_OPTIONS", '{"soc": "Ascend910_9391", "devices": 2}')
    found = in_ranks("exchange", 2, tmp_path, on={"backend": "npu"}, width=width, tokens=5, seed=3)
    for rank in found:
        assert rank["wrong"] == []
        launched = [name for name in rank["launches"] if "MoeDistribute" in name]
        assert len(launched) == (2 if native else 0), rank["launches"]


def test_calls_that_dispatch_and_combine_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call beyond the documented limits, or the communicator's buffer, runs the exchange by all_to_all."""
    given = {"tokens": 8, "width": 2048, "top_k": 8, "num_experts": 64, "ranks": 8, "dtype": torch.bfloat16}
    assert serves(**given)
    for name, value in (
        ("tokens", 0), ("tokens", 513), ("width", 1023), ("width", 7169), ("top_k", 17), ("num_experts", 1024),
        ("ranks", 1), ("ranks", 385), ("dtype", torch.float32), ("tokens", 512),
    ):  # fmt: skip
        assert not serves(**{**given, name: value}), (name, value)
    monkeypatch.setenv("HCCL_BUFFSIZE", "500")
    assert serves(**{**given, "tokens": 512})
