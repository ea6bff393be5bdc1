"""Measures the CPU's collectives, and decode steps at tensor parallel 2. Prints a JSON object.

Two ranks with one thread each, and one process with two threads, run at different times, in turn.

``all_reduce`` has, by bytes, the median microseconds over gloo and in shared memory, and the ratio. ``decode`` has, by
batch, the median milliseconds of a step of the two ranks and of the one process, and the ratio. The ratios are medians
over rounds. The ``fastest`` figures are those of the fastest step, which vary less on a machine with other users.
``launches`` has, by kind of operation, the milliseconds of a step's launches, each at its fastest: a sum that a busy
machine disturbs least. The model has the shapes of Qwen3-0.6B with random weights in bfloat16 and ``--layers`` layers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # torch would import torch_npu, which fails without CANN.

import torch
from helpers.large_checkpoint import write
from torch import distributed
from torch._C._distributed_c10d import TCPStore

import hal

CONTEXT = 128  # tokens in each sequence's cache
BATCHES = (1, 32)
COLLECTIVES = ("all_reduce", "all_gather")
BYTES = (2 << 10, 8 << 10, 64 << 10, 1 << 20)


def median_us(call: Callable[[], object], times: int) -> float:
    found = []
    for _ in range(times):
        distributed.barrier()
        start = time.perf_counter()
        for _ in range(5):
            call()
        found.append((time.perf_counter() - start) / 5 * 1e6)
    return statistics.median(found)


def all_reduces(backend: hal.Backend) -> dict[str, Any]:
    from hal.parallel import collectives

    kernels, group, found = backend.kernels, backend.mesh.tensor.name, {}
    for size in BYTES:
        x = torch.randn(size // 2).bfloat16()
        out = torch.empty_like(x)
        rounds = [
            (
                median_us(lambda: collectives.all_reduce(x, group, out), 10),  # noqa: B023
                median_us(lambda: kernels["all_reduce"](x, group, out), 10),  # noqa: B023
            )
            for _ in range(7)
        ]
        gloo, shared = (statistics.median(each) for each in zip(*rounds, strict=True))
        found[str(size)] = {
            "gloo_us": gloo,
            "shared_us": shared,
            "ratio": statistics.median(one / other for one, other in rounds),
        }
    return found


def launches(runner: hal.Runner, batch: hal.step.Batch, steps: int) -> dict[str, float]:
    """Return the milliseconds of the launches of a captured step, by kind of operation, each at its fastest."""
    form: Any = runner.forms["decode"]
    (graph,) = form.bucket_for(batch.shape).graphs
    fastest = [float("inf")] * len(graph._calls)
    for _ in range(steps):
        runner.step(batch)
        for index, call in enumerate(graph._calls):
            start = time.perf_counter()
            call()
            fastest[index] = min(fastest[index], time.perf_counter() - start)
    found: dict[str, float] = {}
    for launch, seconds in zip(graph._launches, fastest, strict=True):
        name = launch.name.removeprefix("hal::")
        kind = "products" if "linear" in name else name if name in (*COLLECTIVES, "paged_attention") else "others"
        found[kind] = found.get(kind, 0.0) + seconds * 1e3
    return found


def answer(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


@torch.inference_mode()
def worker(folder: str, ranks: int) -> None:
    """Answer each line of stdin: ``all_reduce``, ``launches batch steps``, or ``batch steps``, for the milliseconds."""
    torch.set_num_threads(2 // ranks)
    compilation = {"compiler": "graph", "capture_sizes": list(BATCHES)}
    backend = hal.open(
        {
            "backend": "cpu",
            "dtype": "bfloat16",
            "cache": {"num_tokens": 64 + max(BATCHES) * 2 * CONTEXT},
            "parallel": {"tensor": ranks},
            "compilation": compilation,
            "options": {"native": True},
        }
    )
    runner = hal.Runner(hal.load_model(folder, backend), backend)
    per_sequence = -(-(CONTEXT + 1) // backend.block_size)
    batches = {}
    for size in BATCHES:
        blocks = [list(range(1 + row * per_sequence, 1 + (row + 1) * per_sequence)) for row in range(size)]
        batches[size] = runner.batch([[7]] * size, blocks, cached=[CONTEXT] * size)
        for _ in range(3):
            runner.step(batches[size])
    answer("ready")
    for line in sys.stdin:
        if line.strip() == "all_reduce":
            answer(all_reduces(backend))
            continue
        *kind, size, steps = line.split()
        if kind:
            answer(launches(runner, batches[int(size)], int(steps)))
            continue
        times = []
        for _ in range(int(steps)):
            start = time.perf_counter()
            runner.step(batches[int(size)])
            times.append((time.perf_counter() - start) * 1e3)
        answer(times)


class Contender:
    """Processes that measure together; the first one answers."""

    def __init__(self, folder: str, ranks: int) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        self.processes = []
        for rank in range(ranks):
            environment = {**os.environ, "OMP_NUM_THREADS": str(2 // ranks), "GLOO_SOCKET_IFNAME": "lo"}
            if ranks > 1:
                environment |= {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(ranks),
                    "LOCAL_RANK": str(rank),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(self.store.port),
                    "TORCHELASTIC_USE_AGENT_STORE": "True",
                }
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-P", __file__, "--worker", folder, "--ranks", str(ranks)],
                    env=environment,
                    text=True,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
            )
        self.answers()

    def answers(self) -> str:
        """Wait for every process, and return the first one's answer."""
        lines = [process.stdout.readline() for process in self.processes if process.stdout]
        if not all(lines):
            raise SystemExit("a worker failed; see above")
        return lines[0]

    def ask(self, line: str) -> Any:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{line}\n")
            process.stdin.flush()
        return json.loads(self.answers())

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--worker")
    parser.add_argument("--ranks", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.worker, arguments.ranks)
        return
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), num_hidden_layers=arguments.layers, vocab_size=151936)
        contenders = [Contender(folder, 2), Contender(folder, 1)]
        try:
            reduced = contenders[0].ask("all_reduce")
            decode = {}
            for size in BATCHES:
                steps = 8 if size == 1 else 4
                times = [[each.ask(f"{size} {steps}") for each in contenders] for _ in range(arguments.rounds)]
                rounds = [[statistics.median(each) for each in pair] for pair in times]
                two, one = (statistics.median(each) for each in zip(*rounds, strict=True))
                fastest = [min(min(each) for each in side) for side in zip(*times, strict=True)]
                decode[str(size)] = {
                    "tensor_parallel_ms": two,
                    "one_process_ms": one,
                    "ratio": statistics.median(first / second for first, second in rounds),
                    "fastest_tensor_parallel_ms": fastest[0],
                    "fastest_one_process_ms": fastest[1],
                    "fastest_ratio": fastest[0] / fastest[1],
                    "launches": {
                        name: each.ask(f"launches {size} {steps * arguments.rounds}")
                        for name, each in zip(("tensor_parallel", "one_process"), contenders, strict=True)
                    },
                }
        finally:
            for each in contenders:
                each.close()
    sys.stdout.write(json.dumps({"layers": arguments.layers, "all_reduce": reduced, "decode": decode}, indent=1) + "\n")


if __name__ == "__main__":
    main()
