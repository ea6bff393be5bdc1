"""Counts the calls of hal's Python functions in a captured decode step, which the host runs for every token."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import hal

LIMIT = 80
"""Calls for a token, of which a driver's kernels are no part."""
MOST = {
    "backends.npu.backend": 2,
    "backends.npu.device": 3,
    "backends.npu.graph": 3,
    "backends.npu.kernels.kernels": 1,
    "backends.npu.lengths": 1,
    "device.closing": 2,
    "device.device": 6,
    "device.graph": 5,
    "device.host_device": 4,
    "device.host_values": 2,
    "drivers.backend": 2,
    "execution.capture.captured_form": 2,
    "execution.capture.full_graph": 2,
    "execution.runner": 4,
    "execution.step_output": 3,
    "execution.steps": 3,
    "generation.generate": 1,
    "generation.request": 6,
    "generation.scheduler": 6,
    "ops.kernels.kernel_table": 3,
    "step.batch": 2,
    "step.batch_inputs": 3,
    "step.block_table": 1,
    "step.input_batch": 6,
    "step.new_tokens": 5,
    "step.padding": 4,
    "step.shape": 1,
    "step.staging": 2,
}
"""The calls for a token by module. One that needs more takes them from another."""


def check_calls(runner: hal.Runner, *, without: str = "-") -> None:
    """Check the calls of a step that decodes one token.

    Args:
        runner: captures decode steps.
        without: the package of kernels whose calls do not count.
    """
    found: Counter[str] = Counter()

    def count(frame: Any, event: str, _: object) -> None:
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.startswith("hal.") and not frame.f_code.co_filename.startswith("<"):
            found[name.removeprefix("hal.")] += 1

    tokens = hal.generate(runner, [[1, 2, 3]], hal.SamplingParams(max_new_tokens=16, ignore_eos=True))
    for _ in range(8):
        next(tokens)
    sys.setprofile(count)
    try:
        next(tokens)
    finally:
        sys.setprofile(None)
    tokens.close()  # type: ignore[attr-defined]
    counted = {name: times for name, times in found.items() if not name.startswith(without)}
    grown = {
        name: f"{times} calls, not {MOST.get(name, 0)}" for name, times in counted.items() if times > MOST.get(name, 0)
    }
    assert not grown
    assert 0 < sum(counted.values()) < LIMIT
