"""Tests of models that ranks split between emulated NPUs: one NPU's tokens, memory, and failures of ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import large_checkpoint, rank_programs
from helpers.checkpoints import random_checkpoint
from helpers.fault_checks import check_fault
from helpers.ranks import started

from hal.quantize.quantize_checkpoint import quantize_checkpoint

NPU = {"backend": "npu", "options": {"emulator": "on"}}
MODES = ["eager", "graph", "piecewise", "npugraph_ex"]
FAULTS = [
    ("killed", "joining"), ("killed", "loading"), ("raises", "capture"), ("skips", "capture"), ("killed", "replay"),
    ("late", "replay"), ("killed", "sampling"), ("raises", "sampling"),
]  # fmt: skip
"""Faults of a rank, and their points in a job."""


@pytest.fixture(scope="module")
def checkpoints(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a dense checkpoint, one with experts, and the first in W8A8 with static and with dynamic scales."""
    folder, trained = tmp_path_factory.mktemp("quantized"), repository / "checkpoints" / "tiny-python"
    text = (repository / "README.md").read_text(encoding="utf-8")
    quantize_checkpoint(trained, folder / "w8a8", "w8a8", format="modelslim", calibration=text)
    quantize_checkpoint(trained, folder / "w8a8_dynamic", "w8a8_dynamic", format="compressed-tensors")
    experts = repository / "checkpoints" / "tiny-python-moe"
    return {"dense": trained, "experts": experts, **{each: folder / each for each in ("w8a8", "w8a8_dynamic")}}


def devices(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Give processes that start from now on as many emulated NPUs."""
    options = {**json.loads(os.environ["HAL_NPU_EMULATOR_OPTIONS"]), "devices": count}
    monkeypatch.setenv("HAL_NPU_EMULATOR_OPTIONS", json.dumps(options))


@pytest.mark.parametrize(
    ("name", "ranks", "compilers"),
    [
        ("dense", 2, ["graph"]),
        ("dense", 2, ["eager", "piecewise", "npugraph_ex"]),
        ("dense", 4, ["graph", "piecewise"]),
        ("experts", 2, MODES),
        ("experts", 4, ["graph", "piecewise"]),
        ("w8a8", 2, ["graph", "npugraph_ex"]),
        ("w8a8_dynamic", 2, ["eager", "graph", "npugraph_ex"]),
    ],
)
def test_the_same_tokens(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, ranks: int,
    compilers: list[str],
) -> None:  # fmt: skip
    arguments: dict[str, Any] = {"checkpoint": str(checkpoints[name]), "dtype": "float16"}
    alone = rank_programs.tokens(**arguments, compilers=["eager"], parallel={}, on={"backend": "npu"})["eager"]
    devices(monkeypatch, ranks)
    found = started("tokens", ranks, tmp_path, **arguments, compilers=compilers, parallel={"tensor": ranks}, on=NPU)
    for compiler in compilers:
        assert [rank[compiler] for rank in found] == [alone] * ranks, compiler


@pytest.mark.parametrize("ranks", [2, 4])
def test_peak_memory_of_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    devices(monkeypatch, ranks)
    size = large_checkpoint.write(tmp_path / "large", torch.float16, num_hidden_layers=13, vocab_size=4000)
    small = random_checkpoint(tmp_path / "small", head_dim=64)
    arguments = {"checkpoint": str(tmp_path / "large"), "warm": str(small), "dtype": "float16"}
    for found in started("peak", ranks, tmp_path, **arguments, tensor=ranks, on=NPU):
        assert found["read"] <= found["held"] <= 1.05 * size / ranks
        assert found["peak"] <= 1.1 * size / ranks, found


@pytest.mark.parametrize(("fault", "point"), FAULTS)
def test_a_rank_that_fails(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, point: str
) -> None:
    """The other rank gets a typed error in time, and nothing is left behind."""
    job = {"checkpoint": str(trained), "on": {**NPU, "dtype": "float16"}, "compiler": "graph"}
    check_fault(fault, point, tmp_path, monkeypatch, **job)


@pytest.mark.parametrize("data", [1, 2])
def test_a_closed_backend_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: int) -> None:
    """No shared memory, no threads of communicators, and no process groups."""
    devices(monkeypatch, 2 * data)
    mesh = {"tensor": 2, "data": data}
    for first, *later in started("opened_and_closed", 2 * data, tmp_path, on=NPU, parallel=mesh):
        assert (first["memory"], first["started"]) == ([], [])
        assert later == [{"memory": [], "threads": [], "started": []}] * 2
