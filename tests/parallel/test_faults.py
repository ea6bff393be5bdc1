"""Tests of jobs in which a rank fails: at every point, the other gets a typed error in time, and nothing is left."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.fault_checks import FAULTS, check_command, check_fault
from helpers.thorough import EXHAUSTIVE, PROCESSES, thorough

CPU = {"backend": "cpu", "dtype": "float32"}


@thorough(EXHAUSTIVE, r"\[late-sampling")
@thorough(EXHAUSTIVE, r"\[(skips|raises|interrupted)|\[killed-loading")
@thorough(PROCESSES, r"\[(?!killed-replay)")
@thorough(
    EXHAUSTIVE,
    r"\[late-(joining|loading|replay)|\[(killed-(joining|sampling)|raises-(loading|capture)|late-capture|(skips|shapes)-replay)|\[(raises-sampling|killed-capture)",
)
@pytest.mark.parametrize(("fault", "point"), FAULTS)
def test_in_a_job(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, point: str) -> None:
    check_fault(fault, point, tmp_path, monkeypatch, checkpoint=str(trained), on=CPU, compiler="graph")


@thorough(EXHAUSTIVE, r"\[(late|raises)")
@thorough(PROCESSES)
@thorough(EXHAUSTIVE, r"\[killed-(loading|step)")
@pytest.mark.parametrize(
    ("fault", "point", "compiler", "status", "message"),
    [
        ("killed", "loading", "eager", 137, "rank 1 of 2 was ended by SIGKILL; when last seen, the ranks used "),
        ("raises", "loading", "eager", 2, "rank 1 of 2 failed:\n"),
        ("killed", "step", "eager", 137, "rank 1 of 2 was ended by SIGKILL; when last seen, the ranks used "),
        ("raises", "step", "eager", 1, "ValueError: the fault of rank 1"),
        ("late", "step", "eager", 2, "rank 1 did not join all_reduce of "),
        ("killed", "replay", "graph", 137, "rank 1 of 2 was ended by SIGKILL; when last seen, the ranks used "),
    ],
)
def test_in_the_command(
    trained: Path, tmp_path: Path, fault: str, point: str, compiler: str, status: int, message: str
) -> None:
    options = ["--backend", "cpu", "--compiler", compiler]
    check_command(fault, point, trained, tmp_path, options, status, message)
