"""Tests that a rank that does something else is an error on all ranks, in time, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "scripts"))

import hccl

RANKS = 3
IN_TIME = 15.0
"""Seconds until an error, on a busy machine: less than the limits at which a rank would give up by itself."""
CASES: dict[str, tuple[int, str]] = {
    # The limit of a collective in seconds, and what every error names.
    "never": (2, "waited longer than HCCL_EXEC_TIMEOUT, 2 s, for rank 2"),
    "injected": (60, "HcclAllReduce: fault injected by emulated_cann.faults"),
    "skipped": (60, "HcclBroadcast: fault injected by emulated_cann.faults"),
    "destroyed": (60, "destroyed"),
    "destroyed stream": (60, "HcclAllReduce"),
    "counts": (60, "rank 0 calls HcclAllReduce of 8 float32, sum, and rank 2 HcclAllReduce of 9 float32, sum"),
    "sizes": (60, "rank 0 calls HcclAllReduce of 8 float32, sum, and rank 2 HcclAllReduce of 4096 float32, sum"),
    "dtype": (60, "rank 0 calls HcclAllReduce of 8 float32, sum, and rank 2 HcclAllReduce of 8 int32, sum"),
    "reduction": (60, "rank 0 calls HcclAllReduce of 8 float32, sum, and rank 2 HcclAllReduce of 8 float32, max"),
    "kind": (60, "rank 0 calls HcclAllReduce of 8 float32, sum, and rank 2 HcclBroadcast of 8 float32, root 0"),
    "root": (60, "rank 0 calls HcclBroadcast of 8 float32, root 0, and rank 2 HcclBroadcast of 8 float32, root 1"),
    "message": (60, "rank 2 calls HcclRecv of 9 float32 from rank 0, which calls HcclSend of 8 float32"),
    "nobody receives": (2, "waited longer than HCCL_EXEC_TIMEOUT, 2 s"),
    "uneven": (60, "rank 2 sends 3 elements to rank 0, which expects 2"),
}
NOTHING: dict[str, list[str]] = {"files": [], "threads": [], "maps": []}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    """Run all cases in one process per rank, one after the other."""
    before = set(os.listdir("/dev/shm"))
    limits = {"late": 60} | {case: limit for case, (limit, _) in CASES.items()}
    yield hccl.run_ranks("hccl_faults.py", "faults", RANKS, str(tmp_path_factory.mktemp("ranks")), limits)
    assert set(os.listdir("/dev/shm")) <= before


@pytest.mark.parametrize("case", CASES)
def test_every_rank_fails_in_time_and_nothing_is_left(outcomes: list[dict[str, Any]], case: str) -> None:
    """The next call does not pair with the failed one, and a new communicator works."""
    _, named = CASES[case]
    for rank, all_cases in enumerate(outcomes):
        first, again = all_cases[case]["first"], all_cases[case]["again"]
        is_cause = rank == RANKS - 1 and case in ("never", "nobody receives", "destroyed", "destroyed stream")
        assert first["error"], (rank, case)
        assert is_cause or named in first["error"], (rank, first)
        assert first["seconds"] < IN_TIME, (rank, first)
        if case != "destroyed" or rank < RANKS - 1:  # Its new communicator has no other rank.
            assert "the communicator is broken: " in again["error"], (rank, again)
            assert again["seconds"] < IN_TIME
        assert all_cases[case]["result"] == [6.0] * 8
        assert all_cases[case]["left"] == NOTHING


def test_a_late_rank_is_waited_for(outcomes: list[dict[str, Any]]) -> None:
    for each in outcomes:
        assert each["late"]["first"]["error"] is None
        assert each["late"]["result"] == [6.0] * 8


@pytest.mark.parametrize("replay", [False, True])
def test_a_killed_rank(tmp_path: Path, replay: bool) -> None:
    first, second, killed = hccl.run_ranks("hccl_faults.py", "killed", RANKS, str(tmp_path), replay)
    assert killed == -signal.SIGKILL
    for each in (first, second):
        assert "the process of rank 2 (" in each["first"]["error"]
        assert each["first"]["seconds"] < IN_TIME
        assert "the communicator is broken" in each["again"]["error"]
        assert each["left"] == NOTHING


def test_a_rank_that_does_not_connect(tmp_path: Path) -> None:
    limit = {"HCCL_CONNECT_TIMEOUT": "1"}
    (tmp_path / "connect").mkdir()
    first, _ = hccl.run_ranks("hccl_faults.py", "faults", 2, str(tmp_path), {"connect": None}, **limit)
    found = first["connect"]["first"]
    assert (
        "rank 0 waited for rank 1 of 2 to create the communicator for longer than HCCL_CONNECT_TIMEOUT"
        in found["error"]
    )
    assert 0.9 < found["seconds"] < IN_TIME
