"""Benchmarks rewriting of a model's graph against PyTorch's tools. The design limit is half a second at 64 layers."""

from __future__ import annotations

from pytest_benchmark.fixture import BenchmarkFixture

from .measuring import measured, report


def test_rewriting_64_layers(benchmark: BenchmarkFixture) -> None:
    """Compare hal, torch.fx.replace_pattern and Inductor's pattern matcher on the same graph in one run."""
    figures = measured(benchmark, "pass_time.py", OMP_NUM_THREADS="1", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    fused = figures.pop("fused")
    assert fused == {depth: dict.fromkeys(("hal", "fx", "inductor"), 2 * int(depth)) for depth in fused}
    report(
        benchmark,
        **{f"{name}_{depth}": round(value, 3) for name, found in figures.items() for depth, value in found.items()},
        hal_64_over_32=round(figures["hal"]["64"] / figures["hal"]["32"], 2),
    )
