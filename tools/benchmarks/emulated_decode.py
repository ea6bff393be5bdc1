"""Compares a decode step on the emulated NPU with one on the CPU backend, eager. Prints a JSON object for each dtype.

Run it in the environment of torch_npu: ``python tools/benchmarks/emulated_decode.py [CHECKPOINT]``. Without a
checkpoint, the model has random weights in the shapes of Qwen3-0.6B. Both backends step by turns in one process, so
that other processes disturb both, and the ratio is the median over the turns. A step ends when its logits are on the
host.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
from helpers.large_checkpoint import write

import hal

QWEN3_06B = {"num_hidden_layers": 28, "vocab_size": 151936}


def stepper(
    folder: str, dtype: str, options: dict[str, object], context: int, rows: int
) -> tuple[hal.Runner, hal.Batch]:
    """Return a runner with prompts of ``context`` tokens in its cache, and the batch of the next decode step."""
    backend = hal.open({**options, "dtype": dtype, "compilation": {"compiler": "eager"}})
    runner = hal.Runner(hal.load_model(folder, backend), backend)
    size = runner.spec.block_size
    count = context // size + 1
    blocks = [[1 + row * count + each for each in range(count)] for row in range(rows)]
    runner.step(runner.batch([[5] * context] * rows, blocks))
    return runner, runner.batch([[7]] * rows, blocks, cached=[context] * rows)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", nargs="?")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16"])
    arguments = parser.parse_args()
    npu = {"backend": "npu", "options": {"emulator": True}}
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.checkpoint is None:
            write(Path(scratch), **QWEN3_06B)
        for dtype in arguments.dtypes:
            sides = [
                stepper(arguments.checkpoint or scratch, dtype, options, arguments.context, arguments.rows)
                for options in ({"backend": "cpu"}, npu)
            ]
            times: list[list[float]] = []
            for _ in range(arguments.turns + 3):
                times.append([])
                for runner, batch in sides:
                    start = time.perf_counter()
                    runner.step(batch).logits.cpu()
                    times[-1].append((time.perf_counter() - start) * 1e3)
            times = times[3:]
            cpu_ms, npu_ms = (statistics.median(each) for each in zip(*times, strict=True))
            ratio = statistics.median(there / here for here, there in times)
            figures = {"dtype": dtype, "cpu_ms": round(cpu_ms, 2), "npu_ms": round(npu_ms, 2), "ratio": round(ratio, 2)}
            sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
