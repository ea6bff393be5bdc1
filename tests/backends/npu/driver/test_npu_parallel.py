"""Tests of models that ranks split between emulated NPUs: one NPU's tokens and logits, memory, and failed ranks."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import fault_checks, large_checkpoint
from helpers.checkpoints import random_checkpoint
from helpers.one_device import OneDevice
from helpers.ranks import on_npus, started
from helpers.thorough import EXHAUSTIVE, MODE, PROCESSES, thorough

from hal.quantize.quantize_checkpoint import quantize_checkpoint

NPU = {"backend": "npu", "options": {"emulator": "on"}}
ALL = "eager graph piecewise npugraph_ex"


@pytest.fixture(scope="module")
def checkpoints(
    repository: Path, trained: Path, trained_experts: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Return what finds a checkpoint: dense or with experts, as trained, or in W8A8 with static or dynamic scales."""
    sources, folder = {"dense": trained, "experts": trained_experts}, tmp_path_factory.mktemp("quantized")

    @cache
    def found(name: str) -> Path:
        kind, _, scales = name.partition("-")
        if scales == "static":
            text = (repository / "README.md").read_text(encoding="utf-8")[:2000]
            quantize_checkpoint(sources[kind], folder / name, "w8a8", format="modelslim", calibration=text)
        elif scales:
            quantize_checkpoint(sources[kind], folder / name, "w8a8_dynamic", format="compressed-tensors")
        return folder / name if scales else sources[kind]

    return found


@pytest.fixture(scope="module")
def one_npu(checkpoints: Callable[[str], Path]) -> Callable[[str, str], OneDevice]:
    """Return a function that returns what one NPU makes of a checkpoint in a dtype."""

    @cache
    def made(name: str, dtype: str) -> OneDevice:
        return OneDevice.of(checkpoints(name), dtype, {"backend": "npu"})

    return made


def devices(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Give processes that start from now on as many emulated NPUs."""
    options = {**json.loads(os.environ["EMULATED_CANN_OPTIONS"]), "devices": count}
    monkeypatch.setenv("EMULATED_CANN_OPTIONS", json.dumps(options))


Job = tuple[str, str, dict[str, Any], list[str]]
"""A checkpoint, the dtype of computation, the configuration's table `parallel`, and the compilers."""


def job(name: str, dtype: str, compilers: str = "graph", **parallel: Any) -> Job:
    return name, dtype, parallel, compilers.split()


JOBS: dict[str, tuple[int, list[Job]]] = {
    "dense on 2": (2, [job("dense", "float16", tensor=2)]),
    "dense on 2, all compilers": (
        2,
        [job("dense", "float16", "eager piecewise npugraph_ex", tensor=2), job("dense", "bfloat16", tensor=2)],
    ),
    "dense on 2, more compilers": (2, [job("dense", "bfloat16", "eager piecewise npugraph_ex", tensor=2)]),
    "experts on 2": (
        2,
        [
            job("experts", "float16", ALL, tensor=2),
            job("experts", "bfloat16", "eager graph", tensor=2, experts="dispatch"),
            job("experts", "bfloat16", data=2, experts="all_gather"),
            job("experts", "bfloat16", "piecewise", tensor=2, experts="all_to_all"),
        ],
    ),
    "dense W8A8 on 2": (
        2,
        [
            job("dense-static", "float16", "graph npugraph_ex", tensor=2),
            job("dense-dynamic", "float16", "eager piecewise", tensor=2),
        ],
    ),
    "dense W8A8 on 2, more compilers": (
        2,
        [
            job("dense-static", "float16", "eager piecewise", tensor=2),
            job("dense-dynamic", "float16", "graph npugraph_ex", tensor=2),
        ],
    ),
    "experts W8A8 on 2": (
        2,
        [
            job("experts-static", "float16", "eager graph", tensor=2),
            job("experts-dynamic", "float16", "graph piecewise", tensor=2),
            job("experts-static", "float16", "eager graph", tensor=2, experts="all_to_all"),
            job("experts-dynamic", "float16", "graph npugraph_ex", data=2, experts="dispatch"),
            job("experts-static", "bfloat16", tensor=2, experts="all_gather"),
        ],
    ),
    "dense on 4": (
        4,
        [
            job("dense", "float16", ALL, tensor=4),
            job("dense", "bfloat16", tensor=4),
            job("dense", "float16", "graph piecewise", data=2, tensor=2),
        ],
    ),
    "experts on 4": (
        4,
        [
            job("experts", "float16", "npugraph_ex", tensor=4),
            job("experts", "float16", "piecewise", tensor=4, experts="all_to_all"),
            job("experts", "float16", data=4, experts="all_gather"),
        ],
    ),
    "experts on 4, more compilers": (
        4,
        [
            job("experts", "float16", "graph piecewise", tensor=4),
            job("experts", "float16", "eager graph", tensor=4, experts="all_gather"),
            job("experts", "float16", tensor=4, experts="all_to_all"),
            job("experts", "float16", "graph npugraph_ex", tensor=4, experts="dispatch"),
        ],
    ),
    "experts on 2 x 2": (
        4,
        [
            job("experts", "float16", data=4, experts="all_to_all"),
            job("experts", "float16", data=2, tensor=2),
            job("experts", "float16", "eager graph", data=2, tensor=2, experts="all_gather"),
            job("experts", "float16", "graph piecewise", data=2, tensor=2, experts="all_to_all"),
            job("experts", "float16", "graph npugraph_ex", data=2, tensor=2, experts="dispatch"),
        ],
    ),
}


@thorough(MODE, r"\[(?!dense on 2\])")
@thorough(EXHAUSTIVE, r"\[(experts on 2|dense on 4|experts on 2 x 2|experts W8A8 on 2)\]|\[.*, more")
@pytest.mark.parametrize("name", JOBS)
def test_the_same_tokens(
    checkpoints: Callable[[str], Path], one_npu: Callable[[str, str], OneDevice], name: str
) -> None:
    """In float16, the tokens are equal. In bfloat16 and W8A8, they are up to a tie."""
    ranks, jobs = JOBS[name]
    given = [
        {
            "checkpoint": str(checkpoints(name)),
            "dtype": dtype,
            "parallel": parallel,
            "compilers": compilers,
            "continuations": one_npu(name, dtype).texts,
            "on": NPU,
        }
        for name, dtype, parallel, compilers in jobs
    ]
    found = on_npus("several", ranks, jobs=given)
    for number, (name, dtype, parallel, compilers) in enumerate(jobs):
        for compiler in compilers:
            of_ranks, alone = [rank[number] for rank in found], one_npu(name, dtype)
            sys.stdout.write(f"{name} {dtype} {parallel} {alone.check(of_ranks, compiler)}\n")
            if dtype == "float16" and "-" not in name:
                assert of_ranks[0][compiler] == alone.texts


@thorough(MODE)
@thorough(EXHAUSTIVE, r"\[4")
@pytest.mark.parametrize("ranks", [2, 4])
def test_peak_memory_of_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    devices(monkeypatch, ranks)
    size = large_checkpoint.write(tmp_path / "large", torch.float16, num_hidden_layers=13, vocab_size=4000)
    small = random_checkpoint(tmp_path / "small", head_dim=64)
    arguments = {"checkpoint": str(tmp_path / "large"), "warm": str(small), "dtype": "float16"}
    for found in started("peak", ranks, tmp_path, **arguments, tensor=ranks, on=NPU):
        assert found["read"] <= found["held"] <= 1.05 * size / ranks
        assert found["peak"] <= 1.1 * size / ranks, found


@thorough(MODE)
@thorough(
    EXHAUSTIVE,
    r"\[(killed-(loading|capture|replay|sampling)|late-|interrupted-|raises-|skips-|shapes-capture)",
)
@pytest.mark.parametrize(("fault", "point"), fault_checks.FAULTS)
def test_a_rank_that_fails(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, point: str
) -> None:
    """The other rank gets a typed error in time, and nothing is left behind."""
    job = {"checkpoint": str(trained), "on": {**NPU, "dtype": "float16"}, "compiler": "graph"}
    fault_checks.check_fault(fault, point, tmp_path, monkeypatch, **job)


@thorough(MODE)
@thorough(EXHAUSTIVE, r"\[(killed-(loading|capture)|late-|raises-)")
@pytest.mark.parametrize(
    ("fault", "point", "status", "message"),
    [
        ("killed", "loading", 137, "rank 1 of 2 was ended by SIGKILL; when last seen, the ranks used "),
        ("late", "loading", 2, "another rank did not join a collective in time"),
        ("killed", "capture", 137, "rank 1 of 2 was ended by SIGKILL; when last seen, the ranks used "),
        ("raises", "capture", 1, "rank 1 of 2 failed:\n"),
        ("late", "capture", 2, "another rank did not join a collective in time"),
        ("killed", "replay", 137, "rank 1 of 2 was ended by SIGKILL; when last seen, the ranks used "),
        ("late", "replay", 2, "another rank did not join a collective in time"),
    ],
)
def test_a_rank_of_the_command_that_fails(
    trained: Path, tmp_path: Path, fault: str, point: str, status: int, message: str
) -> None:
    options = ["--backend", "npu", "--emulate", "--dtype", "float16", "--compiler", "graph"]
    fault_checks.check_command(fault, point, trained, tmp_path, options, status, message)


@thorough(PROCESSES)
@thorough(EXHAUSTIVE, r"\[2")
@pytest.mark.parametrize("data", [1, 2])
def test_a_closed_backend_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: int) -> None:
    """No shared memory, no threads of communicators, and no process groups."""
    devices(monkeypatch, 2 * data)
    mesh = {"tensor": 2, "data": data}
    for first, *later in started("opened_and_closed", 2 * data, tmp_path, on=NPU, parallel=mesh):
        assert (first["memory"], first["started"]) == ([], [])
        assert later == [{"memory": [], "threads": [], "started": []}] * 2
