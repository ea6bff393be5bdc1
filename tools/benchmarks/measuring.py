"""Runs a benchmark's program in a process, and reports its figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytest_benchmark.fixture import BenchmarkFixture

EMULATE = (sys.executable, "-P", "-c", "from hal.cli import main; main(prog_name='hal')", "emulate", "--")
"""Runs a command on the emulated CANN."""


def measured(
    benchmark: BenchmarkFixture, program: str, *arguments: str, before: Sequence[str] = (), **environment: str
) -> dict[str, Any]:
    """Run a program of this folder once, and return the JSON object that it prints.

    Args:
        benchmark: times the run.
        program: the file's name.
        arguments: of the program.
        before: the command that runs Python.
        environment: variables to set.
    """
    python = [sys.executable, *([] if before else ["-P"])]
    command = [*before, *python, str(Path(__file__).parent / program), *arguments]
    environ = {**os.environ, **environment}

    def run() -> dict[str, Any]:
        result = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
        figures: dict[str, Any] = json.loads(result.stdout)
        return figures

    found: dict[str, Any] = benchmark.pedantic(run, rounds=1)
    return found


def report(benchmark: BenchmarkFixture, **figures: float | str) -> None:
    """Store figures with the benchmark, and print them."""
    benchmark.extra_info.update(figures)
    print(f"\n{benchmark.name}: " + ", ".join(f"{name} {value}" for name, value in figures.items()))  # noqa: T201
