"""Checks what two ranks do if rank 1 has a fault: both get typed errors, in time, and leave nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

import pytest

from helpers import TESTS, faulty_model
from helpers.rank_faults import DIFFERENT, VICTIM, left_behind
from helpers.ranks import failing

TIMEOUT = 12
"""``parallel.timeout`` of faults that are noticed by it, in seconds."""
SHORT = 6
"""``parallel.timeout`` of ranks that join: less than the time in which the starting process ends them."""
LONG = 120
"""``parallel.timeout`` of the others. On a busy machine, ranks that compile are seconds apart."""
SLACK = 8.0
"""Seconds that a busy machine may add."""
GONE = 5.0
"""Seconds after which nothing of ranks that have ended is left, on a busy machine."""

AT: dict[str, tuple[str, ...]] = {
    "joining": ("killed", "raises", "late"),
    "loading": ("killed", "raises", "late"),
    "capture": ("killed", "raises", "late", "skips", "shapes"),
    "replay": ("killed", "interrupted", "late", "skips", "shapes"),
    "sampling": ("killed", "raises", "late"),
}
"""The faults at each point of a job. Joining, loading and sampling have no collective to skip, or to call otherwise."""
FAULTS = [(fault, point) for point, faults in AT.items() for fault in faults]


def check_fault(
    fault: str, point: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *, limit: float = TIMEOUT, **job: Any
) -> None:
    """Run a job with a fault of rank 1, and check rank 0's error, its time, and what the ranks leave behind.

    Args:
        fault: see :class:`helpers.rank_faults.Strike`.
        point: see :data:`AT`.
        folder: an empty folder.
        monkeypatch: sets the ranks' environment.
        limit: seconds after the fault in which rank 0 fails.
        job: arguments of :func:`helpers.rank_faults.faulty`.
    """
    mark, temporary = uuid.uuid4().hex, folder / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("RANKS_OF_TEST", mark)
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "cache"))  # torch keeps its cache between processes.
    shared = set(os.listdir("/dev/shm"))
    timeout = SHORT if point == "joining" else TIMEOUT if fault == "late" else LONG
    failing("faulty", 2, folder, fault=fault, point=point, into=str(folder), timeout=timeout, **job)
    ended, struck = time.monotonic(), float((folder / "time.txt").read_text())
    ranks = [_read(folder / f"{rank}.json") for rank in range(2)]

    assert ranks[0]["error"] == "CommunicationError", ranks
    assert "remedy: " in ranks[0]["text"]
    earliest = -SLACK if (point, fault) in DIFFERENT else 0.0  # The ranks notice a difference in any order.
    assert earliest <= ranks[0]["time"] - struck < limit + SLACK, ranks
    joins_late = (fault, point) == ("late", "joining")  # It may be ended before it gives up.
    if fault == "killed":
        assert ranks[VICTIM] == {}
    else:
        expected = {"raises": "ValueError", "interrupted": "KeyboardInterrupt"}.get(fault, "CommunicationError")
        may_end = fault == "skips" or joins_late
        assert ranks[VICTIM].get("error") in ({expected, None} if may_end else {expected})
    assert ended - struck < 60
    check_nothing_left(mark, shared, temporary)


def check_command(
    fault: str, point: str, trained: Path, folder: Path, options: Sequence[str], status: int, message: str
) -> None:
    """Run ``hal generate`` with a fault of rank 1 of 2, and check its exit status, error, time, and what it leaves.

    Args:
        fault: ``killed``, ``raises`` or ``late``.
        point: see :mod:`helpers.faulty_model`.
        trained: a checkpoint.
        folder: an empty folder.
        options: options of the command, such as the backend.
        status: the exit status.
        message: a part of the first error.
    """
    checkpoint, temporary = faulty_model.write_faulty(trained, folder), folder / "temporary"
    temporary.mkdir()
    mark, shared = uuid.uuid4().hex, set(os.listdir("/dev/shm"))
    asked = ["--prompt", "def main():", "--max-new-tokens", "900"]
    start = time.monotonic()
    ran = subprocess.run(
        [sys.executable, "-m", "hal_command", "generate", str(checkpoint), *asked, "--tensor-parallel", "2", *options],
        env={
            **os.environ,
            "PYTHONPATH": f"{folder}:{TESTS}",
            "TMPDIR": str(temporary),
            "RANKS_OF_TEST": mark,
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
            "HAL_PARALLEL__TIMEOUT": str(TIMEOUT),
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            "FAULT": fault,
            "FAULT_AT": point,
        },
        capture_output=True,
        timeout=200,
        check=False,
        text=True,
    )
    assert (ran.returncode, message in ran.stderr) == (status, True), ran.stderr
    # The others fail too, but the error of the rank that failed first is shown.
    assert ("look for the first error of another rank" in ran.stderr) == (fault == "late"), ran.stderr
    assert time.monotonic() - start < 150
    check_nothing_left(mark, shared, temporary)


def check_nothing_left(mark: str, shared: Set[str], temporary: Path) -> None:
    """Check that ranks leave no process, no shared memory and no temporary file.

    Tests that run at the same time may have shared memory for a moment, so that the check is repeated.

    Args:
        mark: a text in the environment of the ranks.
        shared: the names in /dev/shm before the ranks were started.
        temporary: the ranks' folder of temporary files.
    """
    until = time.monotonic() + GONE
    while (left := _left(mark, shared, temporary)) and time.monotonic() < until:
        time.sleep(0.1)
    assert left == []


def _left(mark: str, shared: Set[str], temporary: Path) -> list[str]:
    names = set(os.listdir("/dev/shm")) - shared
    return [*left_behind(mark), *sorted(names), *map(str, temporary.iterdir())]


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}
