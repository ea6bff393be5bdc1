"""Loading of quantized checkpoints: seconds and peak memory of each format beside bfloat16's.

Writes a random Qwen3 in bfloat16 and in each format, with random numbers and scales. Loads each several times in new
processes, with its files in the page cache. Prints a table: the bytes that stay, the peak growth of memory
divided by them, the shortest of some loads in seconds and as a multiple of bfloat16's, and the part of it that the
checks of scales, zero points and indices take.

Arguments: ``--layers N``; ``--rounds N``; ``--pack`` for weights in the CPU's own layout; ``--format NAME``,
repeatable.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from helpers import large_checkpoint
from helpers.low_bits import WHOLE, Format, write
from helpers.quantized import PARTS

HALF, SHORT = torch.float16, torch.bfloat16
FORMATS = {
    "fp8, blocks of 128": Format("fp8", group=128),
    "fp8, rows": Format("compressed-fp8", group=0),
    "int8, groups of 128": Format(WHOLE, bits=8, group=128, symmetric=True, dtype=SHORT),
    "packed int4, groups of 128": Format("compressed-tensors", group=128, symmetric=True, dtype=SHORT),
    "awq, groups of 128": Format("awq", group=128, dtype=HALF),
    "gptq, groups of 128": Format("gptq", group=128, dtype=HALF),
    "gptq, act-order": Format("gptq", group=128, dtype=HALF, ordered=True),
}
PROGRAM = """
import gc, json, sys, time
import hal, hal.models.qwen3, hal.checkpoint.loading as loading
checked, checks = 0.0, loading.check_values
def timed(*arguments):
    global checked
    start = time.perf_counter()
    checks(*arguments)
    checked += time.perf_counter() - start
loading.check_values = timed
backend = hal.open({"backend": "cpu", "dtype": "bfloat16", "options": {"pack_weights": json.loads(sys.argv[2])}})
before, start = backend.device.memory_stats().allocated, time.perf_counter()
model = hal.load_model(sys.argv[1], backend)
seconds, peak = time.perf_counter() - start, backend.device.memory_stats().peak - before
held = {each.data_ptr(): each.nbytes for each in (*model.parameters(), *model.buffers())}
print(json.dumps({"seconds": seconds, "peak": peak, "held": sum(held.values()), "checked": checked}))
"""


def measure(folder: Path, pack: bool, rounds: int) -> dict[str, float]:
    """Return the round with the fewest seconds, with the largest peak of all."""
    command, found = [sys.executable, "-c", PROGRAM, str(folder), json.dumps(pack)], []
    for _ in range(rounds):
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        found.append(json.loads(result.stdout.splitlines()[-1]))
    return {**min(found, key=lambda each: each["seconds"]), "peak": max(each["peak"] for each in found)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pack", action="store_true")
    parser.add_argument("--format", action="append", choices=FORMATS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        plain, shape = Path(name, "plain"), {"num_hidden_layers": options.layers, "vocab_size": 4096}
        large_checkpoint.write(plain, **shape)
        tensors = load_file(plain / "model.safetensors")
        found = {"bfloat16": measure(plain, options.pack, options.rounds)}
        for title in options.format or FORMATS:
            format, folder, draw = FORMATS[title], Path(name, "quantized"), torch.Generator().manual_seed(0)
            large_checkpoint.write(folder, **shape)
            made: dict[str, Any] = {}
            for full, tensor in tensors.items():
                layer, _, suffix = full.rpartition(".")
                if suffix != "weight" or layer.rpartition(".")[2] not in PARTS:
                    made[full] = tensor
                    continue
                parts, _ = format.quantized(tensor, draw)
                made |= {f"{layer}.{each}": value.contiguous() for each, value in parts.items()}
            write(folder, made, format.section())
            found[title] = measure(folder, options.pack, options.rounds)
    lines = [
        "| weights | MB that stay | peak / that | seconds | / bfloat16's | of it checks |",
        "|---|---|---|---|---|---|",
    ]
    first = found["bfloat16"]["seconds"]
    for title, each in found.items():
        share, ratio = each["checked"] / each["seconds"], each["seconds"] / first
        lines.append(
            f"| {title} | {each['held'] / 1e6:.0f} | {each['peak'] / each['held']:.2f} | {each['seconds']:.2f} "
            f"| {ratio:.2f} | {share:.0%} |"
        )
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
