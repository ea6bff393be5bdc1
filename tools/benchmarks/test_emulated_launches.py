"""Benchmarks the overhead of the emulated CANN over the ATen call of a kernel. The design limit is 30 us."""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from .measuring import EMULATE, measured, report


@pytest.mark.parametrize("task_queue", ["0", "1"])
def test_an_emulated_launch(benchmark: BenchmarkFixture, task_queue: str) -> None:
    """An addition of 4,096 numbers in one run: with ATen, through torch_npu, and replayed in a graph."""
    figures = measured(
        benchmark,
        "emulated_launches.py",
        before=EMULATE,
        TASK_QUEUE_ENABLE=task_queue,
        OMP_NUM_THREADS="1",
        PYTHONSAFEPATH="1",
    )
    aten = figures["aten_us"]
    report(
        benchmark,
        **{name: round(value, 2) for name, value in figures.items()},
        eager_added_us=round(figures["eager_us"] - aten, 2),
        waited_added_us=round(figures["waited_us"] - aten, 2),
        replayed_added_us=round(figures["replayed_us"] - aten, 2),
        eager_over_aten=round(figures["eager_us"] / aten, 1),
    )
