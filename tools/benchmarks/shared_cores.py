"""Measure hal beside processes that use the cores: tokens a second of ``hal generate`` and ``hal bench decode``.

    python tools/benchmarks/shared_cores.py checkpoints/tiny-python --busy 0,1,2,4

For each number of busy processes it runs both with one thread (OMP_NUM_THREADS=1) and with hal's choice, in turns, and
prints the medians and the ratio of hal's choice to one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BUSY = "while True: pass"


@contextmanager
def busy(number: int) -> Iterator[None]:
    """Run processes that each use a core."""
    started = [subprocess.Popen([sys.executable, "-S", "-c", BUSY]) for _ in range(number)]
    try:
        yield
    finally:
        for each in started:
            each.kill()
            each.wait()


def run(hal: str, arguments: list[str], threads: int | None) -> str:
    """Return what a command prints."""
    environ = {name: text for name, text in os.environ.items() if name != "OMP_NUM_THREADS"}
    if threads:
        environ["OMP_NUM_THREADS"] = str(threads)
    done = subprocess.run([hal, *arguments], env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"hal {' '.join(arguments)} failed:\n{done.stderr}")
    return done.stdout + done.stderr


def generate(hal: str, checkpoint: str, tokens: int, threads: int | None) -> float:
    """Return tokens a second of ``hal generate``."""
    text = run(hal, ["generate", checkpoint, "--prompt", "import", "--max-new-tokens", str(tokens)], threads)
    return float(re.findall(r"([\d.]+) tokens/s", text)[-1])


def bench(hal: str, checkpoint: str, threads: int | None) -> float:
    """Return tokens a second of ``hal bench decode`` with graphs at batch 1.

    They are those of the mean: beside other processes a step takes once or twice its time, and a median is either.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        run(
            hal,
            [
                "bench",
                "decode",
                checkpoint,
                "--compiler",
                "graph",
                "--context",
                "64",
                "--repeats",
                "100",
                "--figures",
                str(file),
            ],
            threads,
        )
        return 1 / statistics.mean(json.loads(file.read_text(encoding="utf-8"))["measurements"][0]["seconds"])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--busy", default="0,1,2,4", help="numbers of busy processes")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--hal", default=shutil.which("hal") or "hal", help="the command to measure")
    options = parser.parse_args()
    sys.stdout.write("busy  command   1 thread  hal's choice  ratio   (tokens/s, medians)\n")
    for number in map(int, options.busy.split(",")):
        figures: dict[tuple[str, int | None], list[float]] = {}
        with busy(number):
            for _ in range(options.repeats):
                for threads in (1, None):
                    found = generate(options.hal, options.checkpoint, options.tokens, threads)
                    figures.setdefault(("generate", threads), []).append(found)
                    found = bench(options.hal, options.checkpoint, threads)
                    figures.setdefault(("bench", threads), []).append(found)
        for command in ("generate", "bench"):
            one, chosen = (statistics.median(figures[command, threads]) for threads in (1, None))
            sys.stdout.write(f"{number:4}  {command:8} {one:9.1f} {chosen:13.1f} {chosen / one:6.2f}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
