"""Measures launches on the emulated CANN. Run by `hal emulate` in a subprocess; prints a JSON object.

Each figure is the time in microseconds of one small addition, in the fastest of several rounds of a thousand: with ATen
on CPU tensors; through torch_npu, with one wait at the end, and with a wait after each; and replayed in a graph.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch
import torch_npu  # noqa: F401

COUNT, ROUNDS = 1000, 15


def microseconds(run: Callable[[], None]) -> float:
    run()
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times) / COUNT * 1e6


def additions(tensors: list[torch.Tensor], wait_each: bool = False) -> Callable[[], None]:
    a, b, out = tensors

    def run() -> None:
        for _ in range(COUNT):
            torch.add(a, b, out=out)
            if wait_each:
                torch.npu.synchronize()
        if out.device.type == "npu":
            torch.npu.synchronize()

    return run


@torch.inference_mode()
def main() -> None:
    torch.set_num_threads(1)
    on_cpu = [torch.ones(64, 64) for _ in range(3)]
    on_npu = [each.npu() for each in on_cpu]
    figures = {
        "aten_us": microseconds(additions(on_cpu)),
        "eager_us": microseconds(additions(on_npu)),
        "waited_us": microseconds(additions(on_npu, wait_each=True)),
    }
    graph = torch.npu.NPUGraph()
    a, b, out = on_npu
    with torch.npu.graph(graph):
        for _ in range(COUNT):
            torch.add(a, b, out=out)
    out.zero_()

    def replay() -> None:
        graph.replay()
        torch.npu.synchronize()

    figures["replayed_us"] = microseconds(replay)
    assert out.cpu().eq(2).all()
    sys.stdout.write(json.dumps(figures))


if __name__ == "__main__":
    main()
