"""Benchmarks the CPU's collectives, and decode steps of two ranks with one thread against one process with two."""

from __future__ import annotations

from pytest_benchmark.fixture import BenchmarkFixture

from .measuring import measured, report


def test_tensor_parallel(benchmark: BenchmarkFixture) -> None:
    """The aim for decode steps is 1.15 times the one process, on a machine without other users."""
    figures = measured(benchmark, "tensor_parallel.py", "--layers", "4", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    reduced = {f"all_reduce_{size}": each["ratio"] for size, each in figures["all_reduce"].items()}
    decode = {f"decode_{size}": each["fastest_ratio"] for size, each in figures["decode"].items()}
    report(benchmark, **{name: round(value, 3) for name, value in (reduced | decode).items()})
    assert reduced["all_reduce_8192"] > 2.0, "gloo over shared memory"
