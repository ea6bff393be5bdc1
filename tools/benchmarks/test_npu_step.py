"""Benchmarks hal's own Python code in a decode step on the NPU. The design limit is 100 us at 28 layers."""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from .measuring import measured, report


@pytest.mark.parametrize("task_queue", ["0", "1"])
def test_a_graph_decode_step(benchmark: BenchmarkFixture, task_queue: str) -> None:
    """Compared with torch_npu's calls in the same steps, and with unrelated Python on the same machine."""
    figures = measured(
        benchmark, "npu_step.py", TASK_QUEUE_ENABLE=task_queue, OMP_NUM_THREADS="1", TORCH_DEVICE_BACKEND_AUTOLOAD="0"
    )
    report(
        benchmark,
        **{name: round(value, 1) for name, value in figures.items()},
        own_over_calls=round(figures["own_us"] / figures["calls_us"], 3),
        overlap_saves=round(1 - figures["overlapped_us"] / figures["one_after_another_us"], 2),
    )
