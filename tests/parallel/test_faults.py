"""Tests of jobs in which a rank fails: at every point, the other gets a typed error in time, and nothing is left."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from helpers import TESTS
from helpers.checkpoints import write_json
from helpers.fault_checks import FAULTS, check_fault, check_nothing_left

CPU = {"backend": "cpu", "dtype": "float32"}
METADATA = "Metadata-Version: 2.1\nName: faulty-model\nVersion: 1\n"
ENTRY_POINT = "[hal.models]\nFaultyForCausalLM = helpers.faulty_model:FaultyForCausalLM\n"


@pytest.mark.parametrize(("fault", "point"), FAULTS)
def test_in_a_job(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, point: str) -> None:
    check_fault(fault, point, tmp_path, monkeypatch, checkpoint=str(trained), on=CPU, compiler="graph")


@pytest.fixture
def faulty(trained: Path, tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """Return the trained checkpoint as a model of another package, and the environment with the package."""
    from hal.config import parse_json

    package, checkpoint = tmp_path / "faulty_model-1.dist-info", tmp_path / "checkpoint"
    package.mkdir()
    (package / "METADATA").write_text(METADATA)
    (package / "entry_points.txt").write_text(ENTRY_POINT)
    checkpoint.mkdir()
    for file in trained.iterdir():
        (checkpoint / file.name).symlink_to(file)
    config = dict(parse_json((trained / "config.json").read_text(encoding="utf-8"), "config.json"))
    (checkpoint / "config.json").unlink()
    write_json(checkpoint / "config.json", {**config, "architectures": ["FaultyForCausalLM"]})
    (tmp_path / "temporary").mkdir()
    return checkpoint, {
        **os.environ, "PYTHONPATH": f"{tmp_path}:{TESTS}", "TMPDIR": str(tmp_path / "temporary"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "HAL_PARALLEL__TIMEOUT": "12",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "point", "compiler", "status", "message"),
    [
        ("killed", "loading", "eager", 137, "rank 1 of 2 was ended by SIGKILL"),
        ("raises", "loading", "eager", 2, "rank 1 of 2 failed:\n"),
        ("killed", "step", "eager", 137, "rank 1 of 2 was ended by SIGKILL"),
        ("raises", "step", "eager", 1, "ValueError: the fault of rank 1"),
        ("late", "step", "eager", 2, "rank 1 did not join all_reduce of "),
        ("killed", "replay", "graph", 137, "rank 1 of 2 was ended by SIGKILL"),
    ],
)
def test_in_the_command(
    faulty: tuple[Path, dict[str, str]], fault: str, point: str, compiler: str, status: int, message: str
) -> None:
    checkpoint, environment = faulty
    mark, shared = uuid.uuid4().hex, set(os.listdir("/dev/shm"))
    command = [
        "generate", str(checkpoint), "--prompt", "def main():", "--max-new-tokens", "400", "--backend", "cpu",
        "--compiler", compiler, "--tensor-parallel", "2",
    ]  # fmt: skip
    start = time.monotonic()
    ran = subprocess.run(
        [sys.executable, "-m", "hal_command", *command], capture_output=True, timeout=200, check=False, text=True,
        env={**environment, "FAULT": fault, "FAULT_AT": point, "RANKS_OF_TEST": mark},
    )  # fmt: skip
    assert (ran.returncode, message in ran.stderr) == (status, True), ran.stderr
    assert time.monotonic() - start < 150
    check_nothing_left(mark, shared, Path(environment["TMPDIR"]))
