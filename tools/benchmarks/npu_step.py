"""Measures the host time of a graph decode step on the emulated NPU. Run in a subprocess; prints a JSON object.

A model of 28 narrow layers, one capture, medians of rounds. A round is four consecutive steps that start with an idle
device. ``calls_us`` is the time that a step spends in calls of torch and torch_npu (copies of inputs, replay, update,
events) and ``own_us`` the rest, hal's own Python code, measured in the same steps, without the first of a round.
``own_fastest_us`` is the first decile of the same times: other processes disturb it least. ``own_cpu_us`` is the
processor time of the calling thread in them, which excludes waiting for a core or for Python's lock. ``own_cold_us`` is
``own_us`` of the first step, after the host waited for the device.

The emulated device computes on cores that Python needs; an NPU does not. So in these rounds, an event holds the device
back until the host has launched all four steps. ``own_beside_us`` is ``own_us`` in rounds without the event.

``plain_us`` and ``plain_cold_us`` are the same for a few lines of unrelated Python, and show the effect of the machine:
NPUGraph.update, ``update_us``, leaves the processor's caches to torch_npu, and hal's next code runs from a cold cache.
``overlapped_us`` and ``one_after_another_us`` are from the start of a step to its end on the device, with the update
beside the replay, as in hal, and before it.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
from helpers.large_checkpoint import write

import hal

LAYERS, ROUNDS, ROWS = 28, 60, 4


def elapsed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e6


def plain() -> list[int]:
    """Run about as much Python as a step of hal."""
    ones = torch.zeros(4, dtype=torch.int32)
    torch.equal(ones, ones)
    names = {number: str(number) for number in range(20)}
    return [len(name) for name in names.values()] + ones.tolist()


Calls = list[tuple[str, float, float]]
"""The name of each call, its duration, and the processor time of the calling thread, in microseconds."""


def stamped(name: str, call: Callable[..., Any], calls: Calls) -> Callable[..., Any]:
    """Wrap ``call`` so that it records its duration."""

    def run(*args: Any, **kwargs: Any) -> Any:
        cpu, start = time.thread_time(), time.perf_counter()
        result = call(*args, **kwargs)
        end = time.perf_counter()
        calls.append((name, (end - start) * 1e6, (time.thread_time() - cpu) * 1e6))
        return result

    return run


class Stamped:
    """Wraps an object of torch_npu so that the named methods record their durations."""

    def __init__(self, native: Any, methods: tuple[str, ...], calls: Calls) -> None:
        self._native = native
        for name in methods:
            setattr(self, name, stamped(name, getattr(native, name), calls))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)


@contextmanager
def held_device() -> Iterator[None]:
    """Let the device wait until the end of the block before it runs what the block launches."""
    event = torch.npu.ExternalEvent()  # type: ignore[attr-defined]
    event.wait(torch.npu.current_stream())
    try:
        yield
    finally:
        event.record(torch.npu.Stream())


def opened_runner() -> hal.Runner:
    config = {"compiler": "graph", "capture_sizes": [ROWS]}
    backend = hal.open({"backend": "npu", "options": {"emulator": True}, "compilation": config})
    with tempfile.TemporaryDirectory() as folder:
        write(
            Path(folder),
            num_hidden_layers=LAYERS,
            hidden_size=64,
            intermediate_size=128,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            vocab_size=256,
        )
        return hal.Runner(hal.load_model(folder, backend), backend)


@torch.inference_mode()
def main() -> None:
    torch.set_num_threads(1)
    runner = opened_runner()
    blocks = [[1 + row] for row in range(ROWS)]
    runner.step(runner.batch([[5] * 20] * ROWS, blocks))
    batch = runner.batch([[7]] * ROWS, blocks, cached=[20] * ROWS)
    runner.step(batch)
    torch.npu.synchronize()
    form: Any = runner.forms["decode"]
    bucket = form.bucket_for(batch.shape)
    graph: Any = bucket.graphs[0]
    native = graph._graph
    update_stream = native.graph_dispatch_mode.update_stream
    updates = [{"actual_seq_lengths_kv": [21] * ROWS}] * LAYERS

    def update_then_wait_then_replay() -> None:
        bucket.static.fill(batch)
        native.update(cpu_update_input=updates)
        update_stream.synchronize()
        native.replay()
        torch.npu.synchronize()

    def step_and_wait() -> None:
        runner.step(batch)
        torch.npu.synchronize()

    calls: Calls = []
    graph._graph = Stamped(native, ("replay", "update"), calls)
    graph._replayed = Stamped(graph._replayed, ("record", "wait"), calls)
    bucket.static.fill = stamped("fill", bucket.static.fill, calls)
    figures: dict[str, list[float]] = defaultdict(list)

    def four_steps(beside: bool) -> None:
        for place in range(4):
            calls.clear()
            cpu = time.thread_time()
            step = elapsed(lambda: runner.step(batch).logits)
            cpu = (time.thread_time() - cpu) * 1e6
            spent = sum(taken for _, taken, _ in calls)
            own = step - spent
            if beside:
                figures["own_beside_us"] += [own] if place else []
            elif not place:
                figures["own_cold_us"].append(own)
            else:
                figures["own_us"].append(own)
                figures["own_cpu_us"].append(cpu - sum(taken for _, _, taken in calls))
                figures["calls_us"].append(spent)
                figures["update_us"].append(next(taken for name, taken, _ in calls if name == "update"))

    for _ in range(ROUNDS):
        with held_device():
            four_steps(beside=False)
        torch.npu.synchronize()
        four_steps(beside=True)
        torch.npu.synchronize()
        figures["plain_cold_us"].append(elapsed(plain))
        figures["plain_us"].append(elapsed(plain))
        figures["one_after_another_us"].append(elapsed(update_then_wait_then_replay))
        figures["overlapped_us"].append(elapsed(step_and_wait))
    found = {name: statistics.median(values) for name, values in figures.items()}
    found["own_fastest_us"] = statistics.quantiles(figures["own_us"], n=10)[0]
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
