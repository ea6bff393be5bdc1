"""Peak memory of one contender, in a process of its own.

``python -m hal.bench.figures.peak_memory`` reads a plan from stdin.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import attrs

from hal.bench.bench_errors import BenchmarkError, need
from hal.bench.contenders.extensions import only_imported_extensions
from hal.bench.plan import Plan
from hal.config import read
from hal.errors import HalError

STEPS = 3


def peak(plan: Plan, batch_size: int, contender: str) -> int | None:
    """Bytes that memory grew by at most, from before the weights were loaded to after a few steps.

    Args:
        plan: the plan.
        batch_size: the one to run.
        contender: its name.

    Returns:
        None if the device keeps no such figure.

    Raises:
        BenchmarkError: the process failed.
    """
    side, _, mode = contender.partition(" ")
    compilers = (mode,) if side == "hal" else ()
    keys = attrs.asdict(attrs.evolve(plan, batch_sizes=(batch_size,), compilers=compilers, trace=False))
    order = json.dumps({"plan": keys, "side": side, "mode": mode})
    command = [sys.executable, "-m", "hal.bench.figures.peak_memory"]
    result = subprocess.run(command, input=order, capture_output=True, text=True, check=False)
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["no output"])[-1]
        raise BenchmarkError(
            f"the process that measures the memory of {contender} failed: {last}", "leave out --memory"
        )
    answer = json.loads(result.stdout.splitlines()[-1])
    if "problem" in answer:
        raise BenchmarkError(f"measuring the memory of {contender} failed: {answer['problem']}", answer["remedy"])
    grown: int | None = answer["bytes"]
    return grown


def _main(order: dict[str, Any]) -> int | None:
    import torch

    from hal.bench.contenders.theirs import model_of
    from hal.bench.contenders.workload import Inputs
    from hal.bench.measurement import SIDES
    from hal.bench.plan import settle

    plan = read(Plan, order["plan"], "plan")
    if plan.threads is not None:
        torch.set_num_threads(plan.threads)
    setting = settle(plan)
    if order["side"] == "transformers":
        # Importing its model is no part of what running it takes.
        with only_imported_extensions(), torch.device("meta"):
            model_of(need("transformers", "--against transformers"), setting.checkpoint.config)
    device = setting.backend.device
    before = device.memory_stats().allocated
    contender = SIDES[order["side"]](setting).contender(order["mode"], Inputs(setting, plan.batch_sizes[0]))
    for _ in range(STEPS):
        contender.reset()
        contender.step()
    device.synchronize()
    most = device.memory_stats().peak
    return most - before if most else None


if __name__ == "__main__":
    try:
        answer: dict[str, Any] = {"bytes": _main(json.load(sys.stdin))}
    except HalError as error:
        answer = {"problem": error.problem, "remedy": error.remedy}
    print(json.dumps(answer))  # noqa: T201 - the reader is the process that started this one
