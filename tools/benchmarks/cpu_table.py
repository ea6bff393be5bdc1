"""Measure the CPU driver's steps beside transformers and the floor: one table, for a machine that is otherwise idle.

    python tools/benchmarks/cpu_table.py --repeats 15
    python tools/benchmarks/cpu_table.py --only decode --checkpoint PATH

It runs ``hal bench`` for each line, and prints a line when it is done. With two cores, all lines take about an hour.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from hal.cli.stdout import echo

COLUMNS = (
    "what",
    "batch",
    "hal, ms",
    "x floor",
    "x transformers eager",
    "x transformers compiled",
    "floor, ms",
    "spread, %",
)
SETS = ("amx", "avx512_bf16", "avx512", "avx2", "sse4")


@attrs.frozen
class Line:
    """A run of ``hal bench``.

    Attributes:
        group: the part of the table.
        what: the first column.
        arguments: those of ``hal bench``.
        environ: variables to set.
    """

    group: str
    what: str
    arguments: tuple[str, ...]
    environ: dict[str, str] = attrs.Factory(dict)


def lines(checkpoints: list[str], threads: int) -> Iterator[Line]:
    """Yield the lines of the table."""

    def decode(model: tuple[str, ...], *batches: int, context: int = 512) -> tuple[str, ...]:
        sizes = [text for batch in batches for text in ("--batch-size", str(batch))]
        return ("decode", *model, "--compiler", "graph", "--context", str(context), *sizes)

    against = ("--against", "transformers")
    dtype = ("--dtype", "bfloat16")
    small = ("--shapes", "qwen3-0.6b", *dtype)
    yield Line("decode", "Qwen3-0.6B", (*decode(small, 1, 8, 32), *against))
    yield Line("decode", "Qwen3-0.6B, one thread", (*decode(small, 1, 8), "--threads", "1"))
    yield Line("decode", "Qwen3-0.6B, 4096 cached", decode(small, 1, context=4096))
    for name in ("llama-3.2-1b", "qwen3-4b-8-layers", "qwen3-30b-a3b-4-layers", "gpt-oss-20b-4-layers"):
        yield Line("decode", name, (*decode(("--shapes", name, *dtype), 1, 8), *against))
    for path in checkpoints:
        yield Line("decode", Path(path).name, (*decode((path, *dtype), 1, 8), *against))
    for tokens in ("512", "2048"):
        yield Line("prefill", f"Qwen3-0.6B, {tokens} tokens", ("prefill", *small, "--tokens", tokens, *against))
    for each in SETS:
        variables = {"HAL_CPU_INSTRUCTIONS": each}
        yield Line("instructions", f"Qwen3-0.6B, {each}", decode(small, 1, 8, 32), variables)
    for count in range(1, threads):
        yield Line("threads", f"Qwen3-0.6B, {count} threads", (*decode(small, 1, 8, 32), "--threads", str(count)))


def run(hal: str, line: Line, repeats: int) -> dict[str, Any] | str:
    """Return the figures of a run, or the first line of its error."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        command = [hal, "bench", *line.arguments, "--repeats", str(repeats), "--figures", str(file)]
        done = subprocess.run(command, env={**os.environ, **line.environ}, capture_output=True, text=True, check=False)
        if done.returncode:
            return done.stderr.strip().partition("\n")[0]
        figures: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return figures


def rows(what: str, figures: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the table's rows of a run, one for each batch size."""
    for measured in figures["measurements"]:
        if not measured["contender"].startswith("hal"):
            continue
        took, batch = measured["median_seconds"], measured["batch_size"]
        ratios = [
            f"{measured['speedup'][name]:.2f}" if name in measured["speedup"] else ""
            for name in ("transformers eager", "transformers compiled")
        ]
        first, _, third = statistics.quantiles(measured["seconds"], n=4)
        times = measured["times_floor"]
        yield (
            what,
            str(batch),
            f"{took * 1e3:.1f}",
            f"{times:.2f}",
            *ratios,
            f"{took / times * 1e3:.1f}",
            f"{100 * (third - first) / took:.0f}",
        )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--checkpoint", action="append", default=[], help="a folder to measure too; repeatable")
    parser.add_argument("--only", action="append", help="a part: decode, prefill, instructions, threads; repeatable")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    hal = shutil.which("hal", path=str(Path(sys.executable).parent))
    if hal is None:
        sys.exit("hal is not installed beside this Python")
    echo(f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f}\n")
    echo("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|")
    for line in lines(options.checkpoint, os.cpu_count() or 1):
        if options.only and line.group not in options.only:
            continue
        figures = run(hal, line, options.repeats)
        failed = isinstance(figures, str)
        found = [(line.what, figures, *[""] * (len(COLUMNS) - 2))] if failed else rows(line.what, figures)
        for row in found:
            echo("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
