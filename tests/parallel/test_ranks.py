"""Tests of ranks: collectives between them, their start, and what happens if one fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.ranks import in_ranks

import hal
from hal import ops
from hal.errors import ConfigError
from hal.parallel import SOLO, Group, Mesh, group
from hal.parallel.collectives import KERNELS


@pytest.mark.parametrize("ranks", [2, 4])
def test_collectives_are_what_is_declared(tmp_path: Path, ranks: int) -> None:
    found = in_ranks("collectives", ranks, tmp_path, tensor=ranks, seed=7)
    for name in KERNELS:
        operation = ops.operation(name)
        assert operation.over_shards is not None
        for index in range(len(found[0][name])):
            given = [(rank[f"{name} of"][index], "tensor") for rank in found]
            for rank, expected in zip(found, operation.over_shards(given), strict=True):
                rtol, atol = operation.tolerance[expected.dtype]
                torch.testing.assert_close(rank[name][index], expected, rtol=rtol, atol=atol * ranks)
        if name != "reduce_scatter":
            assert all(map(torch.equal, found[0][name], found[1][name])), "ranks must get the same bits"


def test_a_group_of_one_changes_nothing() -> None:
    x = torch.randn(3, 8)
    for name, kernel in KERNELS.items():
        for result in (kernel(x, SOLO.name), ops.operation(name).reference(x, SOLO.name)):
            assert torch.equal(result, x)
            assert result.data_ptr() != x.data_ptr()


def test_names_of_groups() -> None:
    assert group("solo") is SOLO
    with pytest.raises(ConfigError, match=r"in no group 'sole'\n.*solo"):
        group("sole")
    with pytest.raises(ConfigError, match="rank 2 of 2"):
        Group("two", 2, 2, object())
    with pytest.raises(ConfigError, match="no process group"):
        Group("two", 0, 2)


def test_without_other_ranks() -> None:
    with pytest.raises(ConfigError, match="asks for 2 ranks, and this process was not started as one of them"):
        hal.open({"backend": "cpu", "parallel": {"tensor": 2}})


def test_an_engines_groups() -> None:
    with hal.open("cpu", mesh=Mesh()) as backend:
        assert backend.mesh.size == 1
        with pytest.raises(ConfigError, match="not started as one"):
            backend.configure(hal.Config(backend="cpu", parallel=hal.ParallelConfig(tensor=2)))


def test_the_command(trained: Path) -> None:
    arguments = ["generate", str(trained), "--prompt", "def main():", "--max-new-tokens", "12", "--backend", "cpu"]
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    texts = [
        subprocess.run([sys.executable, "-m", "hal_command", *arguments, *more], env=environment, capture_output=True,
                       timeout=200, check=True).stdout
        for more in ([], ["--tensor-parallel", "2"])
    ]  # fmt: skip
    assert texts[0] == texts[1] != b""


def test_an_error_of_all_ranks_is_shown_once(trained: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "hal_command", "generate", str(trained), "--prompt", "a", "--tensor-parallel", "3"],
        capture_output=True, timeout=200, check=False, text=True,
    )  # fmt: skip
    assert ran.returncode == 2
    assert ran.stderr.count("3 ranks cannot share 4 heads of 128 elements equally") == 1
    assert ran.stdout == ""
