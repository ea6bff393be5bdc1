"""Benchmarks a compiled step against a hand-written function. The design limit is 10 % overhead."""

from __future__ import annotations

from pytest_benchmark.fixture import BenchmarkFixture

from .measuring import measured, report


def test_a_compiled_step(benchmark: BenchmarkFixture) -> None:
    """Both call the same kernels on the same inputs, alternating."""
    figures = measured(benchmark, "compiled_step.py", OMP_NUM_THREADS="1", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    report(benchmark, **{name: round(value, 3) for name, value in figures.items()})
    assert figures["difference"] < 1e-5
