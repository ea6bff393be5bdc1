"""Measures a captured decode step with adapters against the same step of a model without room for them.

    python tools/benchmarks/adapter_step.py CHECKPOINT [BATCH] [RANK]

Each sequence has another adapter, which changes all projections. Prints a JSON object with medians in milliseconds over
rounds in which the variants alternate, and the median of each round's ratio to the step without room: ``adapters`` with
an adapter of each sequence, ``none`` with room and no adapter, ``one`` with one adapter of all sequences.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import hal
from hal.nn.lora import Lora
from hal.ops.lora import NO_ADAPTER

ROUNDS, WARM, CONTEXT = 25, 3, 64


def prepared(checkpoint: Path, batch: int, rank: int | None) -> tuple[hal.Runner, Any]:
    """Return a runner and its model, with random adapters in all slots if there is a rank."""
    adapters = {} if rank is None else {"adapters": {"slots": batch, "rank": rank}}
    blocks = {"num_tokens": 16 * batch * CONTEXT}
    config: Any = {"backend": "cpu", "compilation": {"compiler": "graph", "capture_sizes": [batch]}, "cache": blocks}
    backend = hal.open(config | adapters, activate=False)
    model = hal.load_model(checkpoint, backend)
    with torch.inference_mode():
        for each in model.modules():
            if isinstance(each, Lora):
                each.lora_a.normal_(0, each.lora_a.shape[-1] ** -0.5)
                each.lora_b.normal_(0, 0.02)
    return hal.Runner(model, backend, max_sequences=batch), backend


def step_of(runner: hal.Runner, slots: list[int]) -> Callable[[], object]:
    """Return a decode step of sequences with these slots of adapters."""
    inputs = runner.input_batch(len(slots))
    for slot in slots:
        blocks = runner.blocks.take(runner.spec.blocks_for(CONTEXT + 1))
        assert blocks is not None
        inputs.add([5] * (CONTEXT + 1), blocks, cached=CONTEXT, adapter=slot)
    return lambda: runner.step(inputs.batch())


def main(checkpoint: Path, batch: int = 8, rank: int = 16) -> None:
    """Measure, and print."""
    (plain, first), (adapted, second) = prepared(checkpoint, batch, None), prepared(checkpoint, batch, rank)
    with first, second:
        steps = {
            "without": step_of(plain, [NO_ADAPTER] * batch),
            "adapters": step_of(adapted, list(range(batch))),
            "none": step_of(adapted, [NO_ADAPTER] * batch),
            "one": step_of(adapted, [0] * batch),
        }
        times: dict[str, list[float]] = {name: [] for name in steps}
        for index in range(WARM + ROUNDS):
            for name, step in steps.items():
                start = time.perf_counter()
                step()
                if index >= WARM:
                    times[name].append(1e3 * (time.perf_counter() - start))
    found = {f"{name}_ms": round(statistics.median(each), 2) for name, each in times.items()}
    for name in ("adapters", "none", "one"):
        ratios = [own / base for own, base in zip(times[name], times["without"], strict=True)]
        found[f"{name}_ratio"] = round(statistics.median(ratios), 3)
    sys.stdout.write(json.dumps({"batch": batch, "rank": rank, **found}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
