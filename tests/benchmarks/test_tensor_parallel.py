"""Benchmarks the CPU's collectives, and decode steps of two ranks with one thread against one process with two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from pytest_benchmark.fixture import BenchmarkFixture

from .test_overhead import report

PROGRAM = Path(__file__).parent / "tensor_parallel.py"


def test_tensor_parallel(benchmark: BenchmarkFixture) -> None:
    """The aim for decode steps is 1.15 times the one process, on a machine without other users."""
    environ = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}

    def measure() -> dict[str, Any]:
        command = [sys.executable, "-P", str(PROGRAM), "--layers", "4"]
        return json.loads(subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout)

    figures = benchmark.pedantic(measure, rounds=1)
    reduced = {f"all_reduce_{size}": each["ratio"] for size, each in figures["all_reduce"].items()}
    decode = {f"decode_{size}": each["fastest_ratio"] for size, each in figures["decode"].items()}
    report(benchmark, **{name: round(value, 3) for name, value in (reduced | decode).items()})
    assert reduced["all_reduce_8192"] > 2.0, "gloo over shared memory"
