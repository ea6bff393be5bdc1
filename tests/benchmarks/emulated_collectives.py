"""Measures an all-reduce of 8 KiB between two ranks on the emulated CANN.

    hal emulate --devices 2 -- python tests/benchmarks/emulated_collectives.py [--against FOLDER]

Prints, in microseconds, one all-reduce of 4,096 float16 numbers: eager, and replayed in a graph of 20; the smallest and
the median of several rounds. With ``--against``, it measures in turns with the emulated libraries in that folder,
built from other sources, and prints the ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

RANKS, ELEMENTS, IN_A_GRAPH = 2, 4096, 20
EAGER, REPLAYS, ROUNDS, TURNS = 50, 5, 20, 3


def measure() -> dict[str, list[float]]:
    """Return the times of this rank, by mode."""
    import torch
    import torch.distributed as dist
    import torch_npu  # noqa: F401

    torch.npu.set_device(int(os.environ["RANK"]))
    dist.init_process_group("hccl")
    x = torch.ones(ELEMENTS, dtype=torch.float16, device="npu")

    def eager() -> None:
        dist.all_reduce(x, op=dist.ReduceOp.MAX)

    eager()
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        for _ in range(IN_A_GRAPH):
            eager()

    def times(run: Callable[[], None], count: int, each: int) -> list[float]:
        found = []
        for _ in range(ROUNDS):
            run()
            torch.npu.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                run()
            torch.npu.synchronize()
            found.append((time.perf_counter() - start) / count / each * 1e6)
        return found

    result = {"eager": times(eager, EAGER, 1), "replayed": times(graph.replay, REPLAYS, IN_A_GRAPH)}
    dist.destroy_process_group()
    return result


def run_ranks(libraries: Path | None) -> dict[str, list[float]]:
    """Return the times of rank 0, with the libraries of this environment or of a folder."""
    environ = {**os.environ, "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        environ["MASTER_PORT"] = str(found.getsockname()[1])
    if libraries is not None:
        environ["LD_LIBRARY_PATH"] = str(libraries)
        environ["ASCEND_HOME_PATH"] = environ["ASCEND_TOOLKIT_HOME"] = str(libraries.parent)
        environ["ASCEND_OPP_PATH"] = str(libraries.parent / "opp")
    command = [sys.executable, __file__, "--rank"]
    ranks = [
        subprocess.Popen(command, env={**environ, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(RANKS)
    ]
    texts = [each.communicate(timeout=300)[0] for each in ranks]
    if any(each.returncode for each in ranks):
        raise SystemExit("a rank failed; its error is above")
    return dict(json.loads(texts[0].splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="a folder with other emulated libraries (lib64)")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        sys.stdout.write(json.dumps(measure()) + "\n")
        return
    ours: dict[str, list[float]] = {"eager": [], "replayed": []}
    others: dict[str, list[float]] = {"eager": [], "replayed": []}
    for _ in range(TURNS):
        sides = [(ours, None), (others, arguments.against)] if arguments.against else [(ours, None)]
        for side, libraries in sides:
            for mode, times in run_ranks(libraries).items():
                side[mode] += times
    for mode, times in ours.items():
        line = f"{mode}: min {min(times):.0f} us, median {statistics.median(times):.0f} us"
        if arguments.against:
            other = others[mode]
            line += f"; against min {min(other):.0f} us, median {statistics.median(other):.0f} us"
            ratios = min(other) / min(times), statistics.median(other) / statistics.median(times)
            line += f"; ratio of min {ratios[0]:.1f}, of medians {ratios[1]:.1f}"
        sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    main()
