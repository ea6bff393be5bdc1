"""What a graph decode step costs the host on the emulated NPU. Run in a process of its own; prints a JSON object.

A model of 28 narrow layers, one capture, medians of interleaved rounds, with the device idle before each. ``step_us``
is the whole of ``Runner.decode``; ``calls_us`` the calls into torch and torch_npu that it makes, in a straight line:
the copies of inputs, the replay, two events and the update; ``own_us`` the median of the differences, hal's own Python.
``update_us`` is NPUGraph.update alone. ``overlapped_us`` and ``one_after_another_us`` are from the start of a step to
its end on the device, with the update beside the replay, as hal has it, and finished before the replay starts.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from random_checkpoint import write

import hal

LAYERS, ROUNDS, ROWS = 28, 200, 4


def elapsed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e6


def opened_runner() -> hal.Runner:
    config = {"compiler": "graph", "capture_sizes": [ROWS]}
    backend = hal.open({"backend": "npu", "options": {"emulator": True}, "compilation": config})
    with tempfile.TemporaryDirectory() as folder:
        write(
            Path(folder), num_hidden_layers=LAYERS, hidden_size=64, intermediate_size=128, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, vocab_size=256,
        )  # fmt: skip
        return hal.Runner(hal.load_model(folder, backend), backend)


@torch.inference_mode()
def main() -> None:
    torch.set_num_threads(1)
    runner = opened_runner()
    import torch_npu

    blocks = [[1 + row] for row in range(ROWS)]
    runner.prefill(runner.batch([[5] * 20] * ROWS, blocks))
    batch = runner.batch([[7]] * ROWS, blocks, cached=[20] * ROWS)
    runner.decode(batch)
    torch.npu.synchronize()
    (bucket,) = runner._decode._buckets.values()  # type: ignore[attr-defined]
    fixed, graph = bucket.padded.batch, bucket.graph._graph
    update_stream, replayed = graph.graph_dispatch_mode.update_stream, torch_npu.npu.Event()
    replayed.record()
    updates = [{"actual_seq_lengths_kv": [21] * ROWS}] * LAYERS
    columns = batch.block_table.shape[1]

    def copies() -> None:
        fixed.token_ids[:ROWS] = batch.token_ids
        fixed.positions[:ROWS] = batch.positions
        fixed.slot_mapping[:ROWS] = batch.slot_mapping
        fixed.block_table[:ROWS, :columns] = batch.block_table
        fixed.kv_lens[:ROWS] = batch.kv_lens
        fixed.logits_indices[:ROWS] = batch.logits_indices

    def calls() -> None:
        copies()
        graph.replay()
        update_stream.wait_event(replayed)
        graph.update(cpu_update_input=updates)
        replayed.record()
        bucket.graph.outputs[:ROWS]

    def update_then_wait_then_replay() -> None:
        copies()
        graph.update(cpu_update_input=updates)
        update_stream.synchronize()
        graph.replay()
        torch.npu.synchronize()

    def update_only() -> float:
        copies()
        graph.replay()
        taken = elapsed(lambda: graph.update(cpu_update_input=updates))
        torch.npu.synchronize()
        return taken

    def waited(run: Callable[[], object]) -> float:
        taken = elapsed(run)
        torch.npu.synchronize()
        return taken

    def whole() -> None:
        runner.decode(batch)
        torch.npu.synchronize()

    contenders: list[Callable[[], float]] = [
        lambda: waited(lambda: runner.decode(batch)),
        lambda: waited(calls),
        update_only,
        lambda: elapsed(whole),
        lambda: elapsed(update_then_wait_then_replay),
    ]
    rounds = []
    for index in range(ROUNDS):
        order = range(5) if index % 2 else range(4, -1, -1)
        times = {place: contenders[place]() for place in order}
        rounds.append([times[place] for place in range(5)])
    step, alone, update, overlapped, sequential = (statistics.median(each) for each in zip(*rounds, strict=True))
    figures = {
        "step_us": step,
        "calls_us": alone,
        "own_us": statistics.median(one - two for one, two, *_ in rounds),
        "update_us": update,
        "overlapped_us": overlapped,
        "one_after_another_us": sequential,
    }
    sys.stdout.write(json.dumps(figures))


if __name__ == "__main__":
    main()
