"""Benchmarks rewriting of a model's graph against PyTorch's tools. The design limit is half a second at 64 layers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from pytest_benchmark.fixture import BenchmarkFixture

from .test_overhead import report

PROGRAM = Path(__file__).parent / "pass_time.py"


def test_rewriting_64_layers(benchmark: BenchmarkFixture) -> None:
    """Compare hal, torch.fx.replace_pattern and Inductor's pattern matcher on the same graph in one run."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}

    def measure() -> dict[str, Any]:
        result = subprocess.run(
            [sys.executable, "-P", str(PROGRAM)], env=environ, capture_output=True, text=True, check=True
        )
        figures: dict[str, Any] = json.loads(result.stdout)
        return figures

    figures = benchmark.pedantic(measure, rounds=1)
    fused = figures.pop("fused")
    assert fused == {depth: dict.fromkeys(("hal", "fx", "inductor"), 2 * int(depth)) for depth in fused}
    report(
        benchmark,
        **{f"{name}_{depth}": round(value, 3) for name, found in figures.items() for depth, value in found.items()},
        hal_64_over_32=round(figures["hal"]["64"] / figures["hal"]["32"], 2),
    )
