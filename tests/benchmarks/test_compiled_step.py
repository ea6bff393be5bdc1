"""Benchmarks a compiled step against a hand-written function. The design limit is 10 % overhead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from pytest_benchmark.fixture import BenchmarkFixture

from .test_overhead import report

PROGRAM = Path(__file__).parent / "compiled_step.py"


def test_a_compiled_step(benchmark: BenchmarkFixture) -> None:
    """Both call the same kernels on the same inputs, alternating."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}

    def measure() -> dict[str, float]:
        result = subprocess.run(
            [sys.executable, "-P", str(PROGRAM)], env=environ, capture_output=True, text=True, check=True
        )
        return json.loads(result.stdout)

    figures = benchmark.pedantic(measure, rounds=1)
    report(benchmark, **{name: round(value, 3) for name, value in figures.items()})
    assert figures["difference"] < 1e-5
