"""A plot of a result: each contender's median with its quartiles, and the floor."""

from __future__ import annotations

from pathlib import Path

from hal.bench.bench_errors import need
from hal.bench.measurement import Result


def require() -> None:
    """Raise BenchmarkError unless matplotlib can be imported."""
    need("matplotlib", "--plot")


def plot(result: Result, file: Path) -> None:
    """Write the plot as PNG.

    Raises:
        BenchmarkError: matplotlib is not installed.
    """
    figure_class = need("matplotlib.figure", "--plot").Figure  # needs no display
    sizes = [each.batch_size for each in result.floors]
    figure = figure_class(figsize=(2.5 + 2.5 * len(sizes), 4.5), layout="constrained")
    for axes, floor in zip(figure.subplots(1, len(sizes), squeeze=False)[0], result.floors, strict=True):
        measured = [each for each in result.measurements if each.batch_size == floor.batch_size]
        for place, each in enumerate(measured):
            summary = each.summary
            below, above = summary.median - summary.first_quartile, summary.third_quartile - summary.median
            color = "tab:blue" if each.contender.startswith("hal ") else "tab:gray"
            axes.bar(place, summary.median * 1e3, yerr=[[below * 1e3], [above * 1e3]], capsize=4, color=color)
        axes.axhline(floor.seconds * 1e3, color="black", linestyle="--", label="floor")
        axes.set_xticks(range(len(measured)), [each.contender for each in measured], rotation=45, ha="right")
        axes.set_title(f"batch {floor.batch_size}")
        axes.set_ylabel("ms, median and quartiles")
        axes.legend(frameon=False)
    figure.suptitle(f"{result.plan.workload}: {result.plan.name}, {result.dtype}, {result.plan.length} tokens")
    figure.savefig(file, format="png", dpi=120)
