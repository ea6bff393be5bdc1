"""The process in which one contender's peak memory is measured.

``python -m hal.bench.peak_memory_process`` reads an order from stdin, and prints the bytes, or the problem, as JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from hal.bench.measurement import SIDES
from hal.bench.plan import Plan, prepare
from hal.bench.transformers_side import model_of, only_imported_extensions
from hal.bench.workload import Inputs
from hal.config import read
from hal.config.optional_libraries import need
from hal.errors import HalError

STEPS = 3
"""That a contender runs while its memory is measured."""


def measure(order: dict[str, Any]) -> int | None:
    """Return the bytes that memory grew by at most; None if the device keeps no such figure.

    Args:
        order: the plan's keys as ``plan``, and the contender's ``side`` and ``mode``.
    """
    plan = read(Plan, order["plan"], "plan")
    if plan.threads is not None:
        torch.set_num_threads(plan.threads)
    setting = prepare(plan)
    if order["side"] == "transformers":
        # Importing its model is no part of what running it takes.
        with only_imported_extensions(), torch.device("meta"):
            model_of(need("transformers", "bench", "--against transformers"), setting.checkpoint.config)
    device = setting.backend.device
    before = device.memory_stats().allocated
    side = SIDES[order["side"]](setting)
    loading = device.memory_stats().peak  # A capture restarts the peak.
    contender = side.contender(order["mode"], Inputs(setting, plan.batch_sizes[0]))
    for _ in range(STEPS):
        contender.reset()
        contender.step()
    device.synchronize()
    most = max(loading, device.memory_stats().peak)
    return most - before if most else None


if __name__ == "__main__":
    try:
        answer: dict[str, Any] = {"bytes": measure(json.load(sys.stdin))}
    except HalError as error:
        answer = {"problem": error.problem, "remedy": error.remedy}
    print(json.dumps(answer))  # noqa: T201 - the reader is the process that started this one
