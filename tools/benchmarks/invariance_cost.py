"""Measure what ``numerics.invariant`` costs on the CPU: prompts and decode steps with it and without it, by turns.

    python tools/benchmarks/invariance_cost.py CHECKPOINT... --dtype bfloat16

Prints the medians in ms, and their ratio.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

import hal
from hal.step import LAST

PROMPT, BATCHES = 512, (1, 8, 32)


def opened(checkpoint: str, dtype: str, invariant: bool) -> hal.Runner:
    config = {
        "backend": "cpu",
        "dtype": dtype,
        "numerics": {"invariant": invariant},
        "compilation": {"compiler": "graph", "capture_sizes": list(BATCHES)},
        "cache": {"num_tokens": 40 * PROMPT},
    }
    backend = hal.open(config)
    return hal.Runner(hal.load_model(checkpoint, backend), backend, max_sequences=max(BATCHES))


def step(runner: hal.Runner, batch: int, new: int, cached: int) -> float:
    """Return the milliseconds of a step of ``batch`` sequences with ``new`` tokens each after ``cached`` ones."""
    blocks = [runner.blocks.take(runner.spec.blocks_for(cached + new)) or [] for _ in range(batch)]
    made = runner.batch([[7] * new] * batch, blocks, cached=[cached] * batch)
    start = time.perf_counter()
    with torch.inference_mode():
        runner.step(made, LAST).logits.sum().item()
    took = (time.perf_counter() - start) * 1e3
    for each in blocks:
        runner.blocks.give_back(each)
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--turns", type=int, default=7)
    given = parser.parse_args()
    for checkpoint in given.checkpoints:
        runners = [opened(checkpoint, given.dtype, invariant) for invariant in (False, True)]
        for name, *sizes in (("prompt", 1, PROMPT, 0), *((f"batch {each}", each, 1, PROMPT) for each in BATCHES)):
            times: list[list[float]] = [[], []]
            for turn in range(given.turns + 1):
                for place, runner in enumerate(runners):
                    took = step(runner, *sizes)
                    if turn:  # the first warms up
                        times[place].append(took)
            plain, invariant = map(statistics.median, times)
            print(f"{checkpoint} {name}: {plain:.2f} ms, invariant {invariant:.2f} ms, {invariant / plain:.2f} x")  # noqa: T201


if __name__ == "__main__":
    main()
